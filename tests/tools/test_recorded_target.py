"""A recorded server played by the simulated target: its clock goes on by what launches and runs took, no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from state.models import Failure, LaunchSpec, LoadPoint, Objective, ProcessId, Workload
from tools.simulated import LOOKS, RecordedRun, RecordedStart, Scenario, SimulatedTarget
from tools.target import Ready, RunRequest

pytestmark = pytest.mark.anyio
SCENARIO = Scenario(flags={"--threads": ("1",)}, known_flags=frozenset({"--threads"}), base_tok_s={})
POINT = LoadPoint(name="c1", concurrency=1, requests=10, output_tokens=100)


class Server:
    """Three seconds to start, refuses two threads; a run of 1,000 tokens has a window of 40 s and takes 2 s more."""

    def start(self, launch: str, spec: LaunchSpec) -> RecordedStart:
        if spec.flags["--threads"] == ("2",):
            return RecordedStart(seconds=1.5, refused='error while handling argument "-t": two are too many')
        return RecordedStart(seconds=3.0)

    def run(self, launch: str, run: str, spec: LaunchSpec, request: RunRequest) -> RecordedRun:
        return RecordedRun(tok_s=25.0, measured_s=40.0, idle_s=2.0)


def target(folder: Path) -> SimulatedTarget:
    return SimulatedTarget(folder / "world", SCENARIO, Server())


def request(process: ProcessId) -> RunRequest:
    workload = Workload(load_points=(POINT,), objective=Objective(at=("c1",)))
    return RunRequest(point=POINT, workload=workload, seed=1, process=process)


async def test_a_launch_takes_as_long_as_recorded_and_fails_as_recorded(tmp_path: Path) -> None:
    there = target(tmp_path)
    adoption = await there.adopt()
    await there.launch("T1", adoption.spec)
    ready = await there.await_ready("T1")
    assert isinstance(ready, Ready)
    assert (ready.load_s, there.passed_s) == (3.0, 3.0)
    two = adoption.spec.model_copy(update={"flags": {"--threads": ("2",)}})
    await there.launch("T2", two)
    failed = await there.await_ready("T2")
    assert isinstance(failed, Failure)
    assert "two are too many" in failed.cause
    assert there.passed_s == 4.5
    assert await there.serving() is None


async def test_a_run_is_looked_at_a_few_times_and_ends_on_its_second(tmp_path: Path) -> None:
    there = target(tmp_path)
    adoption = await there.adopt()
    await there.begin_run("M1", request(adoption.process))
    seen = []
    while (state := await there.look_run("M1")).phase == "running":
        seen.append(state)
        await there.pause(0.5)
    assert len(seen) == LOOKS
    assert there.passed_s == pytest.approx(42.0)
    assert (state.elapsed_s, state.output_tokens) == (40.0, 1000)
    assert seen[4].output_tokens == pytest.approx(25.0 * seen[4].elapsed_s, abs=1)
    assert (await there.collect_run("M1")).metrics.output_tok_s == 25.0
    await there.pause(0.5)
    assert there.passed_s == pytest.approx(42.5)


async def test_a_run_that_is_stopped_takes_no_more_time(tmp_path: Path) -> None:
    there = target(tmp_path)
    adoption = await there.adopt()
    await there.begin_run("M1", request(adoption.process))
    await there.pause(0.5)
    await there.stop_run("M1")
    assert (await there.look_run("M1")).phase == "ended"
    await there.pause(0.5)
    assert there.passed_s == pytest.approx(42.0 / LOOKS + 0.5)
