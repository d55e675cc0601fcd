"""What every Target must do; a subclass gives the fixtures `target` (ready to change things), `case` and `intruder`.

Tests share one world and leave a server of ours in it: each begins with whatever serves, and names its own launches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest

from state.errors import CommandFailed, ForeignChange, PolicyRefused
from state.models import Change, Failure, LaunchSpec, LoadPoint, Objective, ProcessId, Workload
from tools.diagnose import complaint
from tools.target import Ready, RunRequest, RunState, Serving, Target


class TargetCase(NamedTuple):
    """Changes that mean something to the server behind the target."""

    better: Change
    unknown: Change
    refused: Change
    """Nothing speaks against it before a launch, and the server does not start with it."""
    cause: str
    """What the failure's cause says then."""
    name: str
    """Unique in the world; begins the keys of this test's launches and runs."""


Intruder = Callable[[], AbstractContextManager[ProcessId]]
"""Puts a server that is neither adopted nor ours on the port for the length of a block."""


def workload(requests: int = 2) -> Workload:
    point = LoadPoint(name="few", concurrency=2, requests=requests, prompt_tokens=16, output_tokens=8)
    return Workload(load_points=(point,), objective=Objective(at=("few",)))


def request(process: ProcessId, requests: int = 2) -> RunRequest:
    asked = workload(requests)
    return RunRequest(point=asked.point("few"), workload=asked, seed=7, process=process)


async def now(target: Target) -> Serving:
    serving = await target.serving()
    assert serving is not None
    return serving


async def up(target: Target, key: str, spec: LaunchSpec) -> Ready:
    await target.launch(key, spec)
    ready = await target.await_ready(key)
    assert isinstance(ready, Ready), ready
    return ready


async def over(target: Target, key: str) -> RunState:
    for _ in range(2400):
        state = await target.look_run(key)
        if state.phase != "running":
            return state
        await target.pause(0.05)
    raise AssertionError(f"run {key} does not end")


@pytest.mark.anyio
class TargetContract:
    @pytest.fixture
    async def good(self, target: Target) -> AsyncIterator[LaunchSpec]:
        """A spec that starts: that of the server which serves at the beginning."""
        yield (await target.adopt()).spec

    # --- looking

    async def test_what_is_adopted_is_what_serves(self, target: Target) -> None:
        first, serving, second = await target.adopt(), await now(target), await target.adopt()
        assert first == second
        assert (first.process, first.spec) == (serving.process, serving.spec)
        assert first.reproducible
        assert first.engine_version

    async def test_it_generates_and_its_facts_are_plausible(self, target: Target, case: TargetCase) -> None:
        await target.adopt()
        assert await target.trouble() is None
        facts = await target.facts()
        assert facts.cores >= 1
        assert facts.mem_available_mb > 0
        assert case.better.name in facts.known_flags
        assert case.unknown.name not in facts.known_flags
        foreign = await target.foreign_cores()
        assert foreign is None or foreign >= 0

    async def test_its_clock_goes_forward_and_a_time_zone_belongs_to_it(self, target: Target) -> None:
        before = await target.clock()
        await target.pause(1.0)
        after = await target.clock()
        assert 0 < after.unix - before.unix < 60
        assert abs(after.offset_s) <= 14 * 3600

    async def test_it_names_its_benchmark_client(self, target: Target) -> None:
        assert await target.client()

    async def test_watching_changes_nothing_that_serves(self, target: Target, good: LaunchSpec) -> None:
        before = await now(target)
        await target.guard(good)
        await target.renew()
        await target.guard(good)
        assert await target.restored_meanwhile() is None
        assert await now(target) == before

    # --- deriving

    async def test_a_change_makes_another_spec_and_nothing_else(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        changed = target.derive(good, (case.better,))
        assert changed.fingerprint != good.fingerprint
        assert [line.split(":")[0] for line in changed.differences(good)] == [f"flags.{case.better.name}"]
        assert target.derive(good, ()) == good
        assert target.derive(changed, (case.better,)) == changed

    async def test_what_the_server_does_not_know_is_refused(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        before = await now(target)
        with pytest.raises(PolicyRefused):
            target.derive(good, (case.better, case.unknown))
        assert await now(target) == before

    # --- launching

    async def test_a_launch_takes_the_place_of_what_served(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        before, key = await now(target), f"{case.name}-T1"
        spec = target.derive(good, (case.better,))
        assert not await target.launched(key)
        ready = await up(target, key, spec)
        serving = await now(target)
        assert await target.launched(key)
        assert (serving.key, serving.process) == (key, ready.process)
        assert serving.process != before.process
        assert serving.spec.fingerprint == spec.fingerprint
        assert ready.load_s >= 0
        assert await target.trouble() is None
        await up(target, f"{case.name}-T2", good)
        assert (await now(target)).spec.fingerprint == good.fingerprint

    async def test_a_launch_happens_once_for_its_key(self, target: Target, case: TargetCase, good: LaunchSpec) -> None:
        first, second = f"{case.name}-T1", f"{case.name}-T2"
        await up(target, first, good)
        once = await now(target)
        await target.launch(first, good)
        assert await now(target) == once
        await up(target, second, good)
        twice = await now(target)
        await target.launch(first, good)
        assert await now(target) == twice
        assert twice.key == second
        assert isinstance(await target.await_ready(first), Failure)

    async def test_a_server_that_refuses_to_start_is_a_failure_with_its_cause(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        key = f"{case.name}-T1"
        await target.launch(key, target.derive(good, (case.refused,)))
        failed = await target.await_ready(key)
        assert isinstance(failed, Failure)
        assert case.cause in failed.cause
        assert failed.failure_class
        assert failed.tail
        assert await target.launched(key)
        assert await target.serving() is None
        assert await target.await_ready(key) == failed
        assert case.cause in await target.log_end(key)
        assert await target.log_end(f"{case.name}-T9") == ""
        await up(target, f"{case.name}-T2", good)

    async def test_somebody_elses_server_is_left_alone(
        self, target: Target, case: TargetCase, good: LaunchSpec, intruder: Intruder
    ) -> None:
        with intruder() as process:
            with pytest.raises(ForeignChange):
                await target.launch(f"{case.name}-T1", good)
            assert not await target.launched(f"{case.name}-T1")
            assert (await now(target)).process == process
            assert (await now(target)).key is None
        await up(target, f"{case.name}-T2", good)

    # --- benchmarking

    async def test_a_run_happens_once_for_its_key(self, target: Target, case: TargetCase, good: LaunchSpec) -> None:
        key, process = f"{case.name}-M1", (await now(target)).process
        assert (await target.look_run(key)).phase == "absent"
        await target.begin_run(key, request(process))
        await target.begin_run(key, request(process, requests=9))
        assert (await over(target, key)).phase == "ended"
        result = await target.collect_run(key)
        assert (result.metrics.requested, result.metrics.completed, result.metrics.failed) == (2, 2, 0)
        assert result.metrics.output_tokens == 16
        assert result.metrics.output_tok_s is not None and result.metrics.output_tok_s > 0
        assert result.answers == ()
        await target.begin_run(key, request(process))
        assert (await target.look_run(key)).phase == "ended"
        assert await target.collect_run(key) == result

    async def test_a_run_asks_the_fixed_prompts_when_it_shall(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        key, process = f"{case.name}-M1", (await now(target)).process
        await target.begin_run(key, request(process).model_copy(update={"answers": True}))
        assert (await over(target, key)).phase == "ended"
        result = await target.collect_run(key)
        assert (result.metrics.completed, result.metrics.output_tokens) == (2, 16)
        assert len(result.answers) == len({answer.prompt for answer in result.answers}) >= 10
        for answer in result.answers:
            assert answer.error is None
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.tops) > 0
            assert all(token in top and len(top) > 1 for token, top in zip(answer.tokens, answer.tops, strict=True))
        assert await target.collect_run(key) == result

    async def test_a_run_can_be_ended(self, target: Target, case: TargetCase, good: LaunchSpec) -> None:
        key, process = f"{case.name}-M1", (await now(target)).process
        await target.begin_run(key, request(process, requests=400))
        assert (await target.look_run(key)).phase == "running"
        await target.stop_run(key)
        assert (await target.look_run(key)).phase == "ended"
        await target.stop_run(key)
        await target.begin_run(key, request(process))
        assert (await target.look_run(key)).phase == "ended"
        assert await target.trouble() is None

    async def test_a_quiet_run_of_a_launch_of_ours_has_no_word_of_an_earlier_one(
        self, target: Target, case: TargetCase, good: LaunchSpec
    ) -> None:
        launch, key = f"{case.name}-T1", f"{case.name}-M1"
        ready = await up(target, launch, good)
        await target.begin_run(key, request(ready.process).model_copy(update={"launch": launch}))
        assert (await over(target, key)).phase == "ended"
        said = await target.said_during(key)
        assert complaint(good.engine, said, up=True) is None
        assert await target.said_during(f"{case.name}-M2") == ""

    async def test_a_run_that_never_began_leaves_no_result(self, target: Target, case: TargetCase) -> None:
        key = f"{case.name}-M1"
        await target.stop_run(key)
        assert (await target.look_run(key)).phase == "absent"
        with pytest.raises(CommandFailed) as caught:
            await target.collect_run(key)
        assert key in str(caught.value)
