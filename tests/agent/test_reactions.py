"""What the loop does when a server fails or complains: simulated, but by real log lines and the real rules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.report import markdown
from agent.session import Runner
from agent.validity import COMPLAINED
from state.errors import NeedsHuman
from state.models import (
    DecisionKind,
    Experiment,
    MeasurementStatus,
    Outcome,
    Role,
    SessionStatus,
    Todo,
    TodoStatus,
    TrialStatus,
)
from state.replay import decision_log
from tests.agent.killing import died_at
from tests.agent.sim import ONE_POINT, flag, sim_session
from tests.agent.test_loop import assert_consistent, outcomes, world_log
from tools.simulated import Scenario, SimEffect

pytestmark = pytest.mark.anyio

FLAGS = {
    "--threads": ("1",),
    "--mem-fraction-static": ("0.88",),
    "--gpu-memory-utilization": ("0.9",),
    "--max-running-requests": ("2048",),
}
CANDIDATE = flag("--cache", "q8_0")
FULL = "[2026-11-30 02:12:28 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1"
TOO_MUCH = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB."
TOO_LITTLE = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
TILE = "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376."
UNTRACEABLE = "torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped"
COLLECTIVE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, Timeout(ms)=600000)"
LOST_GPU = "kernel: NVRM: Xid (PCI:0000:65:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
DEAD = "[2026-11-30 02:29:50] Subprocess scheduler_0 (pid=6052) crashed with exit code -9."
NAN = "[2026-11-30 02:18:11] Detected errors during sampling! NaN in the logits."
LATE_BROADCAST = "No available shared memory broadcast block found in 60 seconds. This typically happens when"
HEADER = "sampling.cuh:25:10: fatal error: curand_kernel.h: No such file or directory\n" + "x\n" * 200
NINJA = "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."
USAGE = 'error while handling argument "-c": stoi\n\nusage:\n' + "-t, --threads N number of threads\n" * 40
OCCUPIED = "Free memory on device cuda:0 (3.1/94.9 GiB) on startup is less than desired GPU memory utilization"


def scenario(*effects: SimEffect, engine: str = "sglang") -> Scenario:
    """A quiet server, so that every verdict but those asked about is plain."""
    return Scenario(
        engine=engine,
        flags=FLAGS,
        known_flags=frozenset({*FLAGS, "--cache", "--poll", "--ep-size", "--eplb", "--pieces", "--compile", "--nccl"}),
        base_tok_s={"c8": 80.0},
        effects=effects,
        run_noise=0.0005,
        launch_noise=0.0005,
    )


def shows(**fields: object) -> SimEffect:
    """What the candidate does."""
    return SimEffect.model_validate({"name": "--cache", "value": "q8_0", "ratio": {"*": 1.5}} | fields)


def todo_of(runner: Runner, name: str) -> Todo:
    (found,) = [todo for todo in runner.store.todos(runner.session_id) if todo.id == name]
    return found


def kinds_of(runner: Runner, subject: str) -> list[str]:
    return [d["kind"] for d in runner.store.decisions(runner.session_id) if d["subject"] == subject]


def failed_launches(runner: Runner, name: str) -> int:
    trials = runner.store.trials(runner.session_id)
    return sum(1 for trial in trials if trial.experiment_id == name and trial.status is TrialStatus.FAILED)


async def known_good_serves(runner: Runner) -> bool:
    serving = await runner.target.serving()
    return serving is not None and serving.spec.fingerprint == runner.store.role(runner.session_id, Role.KNOWN_GOOD)


# --- a candidate that does not start ---


class Start(NamedTuple):
    """A log with which every launch of the candidate ends, and what is to come of it."""

    engine: str
    log: str
    decision: DecisionKind
    status: TodoStatus
    launches: int = 1
    exit_code: int = 1


BLOCK, ADJUST, SKIP = DecisionKind.BLOCK, DecisionKind.ADJUST, DecisionKind.SKIP
BLOCKED, DONE, SKIPPED = TodoStatus.BLOCKED, TodoStatus.DONE, TodoStatus.SKIPPED
STARTS = {
    "an unknown flag": Start("sglang", "x.py: error: unrecognized arguments: --enable_metrics", BLOCK, BLOCKED, 1, 2),
    "a bad value, with the usage behind it": Start("llamacpp", USAGE, BLOCK, BLOCKED),
    "more memory is asked for": Start("sglang", TOO_LITTLE, ADJUST, DONE),
    "less memory is asked for": Start("sglang", TOO_MUCH, ADJUST, DONE),
    "no blocks for the cache": Start("vllm", "ValueError: No available memory for the cache blocks.", ADJUST, DONE),
    "memory that something else holds": Start("vllm", OCCUPIED, ADJUST, DONE, 2),
    "a tile that the GPU cannot hold": Start("sglang", TILE, BLOCK, BLOCKED),
    "a missing kernel": Start("vllm", "no kernel image is available for execution on the device", BLOCK, BLOCKED),
    "a header that is missing": Start("sglang", HEADER + NINJA, SKIP, SKIPPED),
    "a model that cannot be traced": Start("sglang", UNTRACEABLE, BLOCK, BLOCKED),
    "a collective that never worked": Start("vllm", COLLECTIVE.format(1), BLOCK, BLOCKED, 2),
    "a watchdog": Start("sglang", "Watchdog timeout (self.watchdog_timeout=300)\npy-spy: not found", BLOCK, BLOCKED, 2),
    "a unit that may not start again yet": Start("vllm", "vllm.service: start-limit-hit", BLOCK, BLOCKED, 2),
    "a port that is busy": Start("vllm", "OSError: [Errno 98] Address already in use", BLOCK, BLOCKED, 2),
    "nothing that a rule explains": Start("vllm", "KeyError: 'model.layers.0.mlp.gate'", BLOCK, BLOCKED, 2),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
async def test_a_failed_start_has_the_tries_and_the_end_that_it_deserves(tmp_path: Path, start: Start) -> None:
    world = scenario(shows(refuses=start.log, exit_code=start.exit_code), engine=start.engine)
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert kinds_of(runner, "cache-q8_0") == ["choose", start.decision]
        assert todo_of(runner, "cache-q8_0").status is start.status
        assert failed_launches(runner, "cache-q8_0") == start.launches
        assert outcomes(runner)["cache-q8_0"] is Outcome.FAILED
        followers = [t for t in runner.store.todos(runner.session_id) if t.experiment.source.ref == "cache-q8_0"]
        assert bool(followers) == (start.decision is ADJUST)
        assert await known_good_serves(runner)
        assert_consistent(runner)


RETRIED = ("memory that something else holds", "a collective that never worked", "a watchdog", "a port that is busy")


@pytest.mark.parametrize("name", RETRIED)
async def test_what_starts_at_the_second_try_is_not_blamed(tmp_path: Path, name: str) -> None:
    world = scenario(shows(refuses=STARTS[name].log, times=1), engine=STARTS[name].engine)
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.BETTER
        assert failed_launches(runner, "cache-q8_0") == 1
        assert_consistent(runner)


async def test_a_setting_that_is_not_to_blame_stays_open(tmp_path: Path) -> None:
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(shows(refuses=HEADER + NINJA))) as runner:
        assert await runner.run() == 0
        assert "stays open for another night" in todo_of(runner, "cache-q8_0").reason
        (found,) = [f for f in runner.store.findings(runner.session_id) if "--cache q8_0" in f.statement]
        assert found.statement.startswith("--cache q8_0: could not be tried here (environment: ")


async def test_a_gpu_that_is_lost_calls_a_person_once_known_good_serves(tmp_path: Path) -> None:
    world = scenario(shows(refuses=LOST_GPU))
    with sim_session(tmp_path, CANDIDATE, flag("--poll", "0"), config=ONE_POINT, scenario=world) as runner:
        with pytest.raises(NeedsHuman, match="wants a person") as raised:
            await runner.run()
        assert "GPU has fallen off the bus" in raised.value.where["diagnosis"]
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.NEEDS_HUMAN, 6)
        assert todo_of(runner, "cache-q8_0").status is SKIPPED
        assert await known_good_serves(runner)
    with sim_session(tmp_path, CANDIDATE, flag("--poll", "0"), config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert failed_launches(runner, "cache-q8_0") == 1
        assert "poll-0" in outcomes(runner)
        assert_consistent(runner)


async def test_a_full_disk_stops_the_session_with_known_good_and_a_resume_goes_on(tmp_path: Path) -> None:
    world = scenario(shows(refuses="OSError: [Errno 28] No space left on device"))
    with sim_session(tmp_path, CANDIDATE, flag("--poll", "0"), config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 4
        row = runner.store.session(runner.session_id)
        assert row.status is SessionStatus.STOPPED
        assert "trying on cannot help: environment: " in row.reason
        assert await known_good_serves(runner)
    with sim_session(tmp_path, CANDIDATE, flag("--poll", "0"), config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert "poll-0" in outcomes(runner)
        assert_consistent(runner)


async def test_known_good_that_does_not_start_is_diagnosed_for_the_person(tmp_path: Path) -> None:
    gone = SimEffect(name="--threads", value="1", refuses="KeyError: 'model.layers.0.mlp.gate'", unless=("--poll", "0"))
    with sim_session(tmp_path, flag("--poll", "0"), config=ONE_POINT, scenario=scenario(gone)) as runner:
        with pytest.raises(NeedsHuman, match="does not start any more") as raised:
            await runner.run()
        assert raised.value.where["diagnosis"].startswith("unknown: ")
        assert raised.value.where["diagnosis"].endswith("calls for: restore and stop")
        assert sum(1 for trial in runner.store.trials(runner.session_id) if trial.failure is not None) == 2


# --- opposite advice ---

NARROW = (
    SimEffect(name="--mem-fraction-static", value="*", above=0.87, when=("--cache", "q8_0"), refuses=TOO_MUCH),
    SimEffect(name="--mem-fraction-static", value="*", below=0.85, when=("--cache", "q8_0"), refuses=TOO_LITTLE),
    shows(),
)
"""With the candidate only a fraction from 0.85 to 0.87 starts; the parent has 0.88."""


async def test_opposite_advice_meets_in_the_middle_together_with_the_experiments_own_changes(tmp_path: Path) -> None:
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(*NARROW)) as runner:
        assert await runner.run() == 0
        said = outcomes(runner)
        assert said["cache-q8_0"] is Outcome.FAILED
        assert said["cache-q8_0-mem-fraction-static-0.84"] is Outcome.FAILED
        assert said["cache-q8_0-mem-fraction-static-0.86"] is Outcome.BETTER
        final = await runner.target.serving()
        assert final is not None
        assert final.spec.flags["--cache"] == ("q8_0",)
        assert final.spec.flags["--mem-fraction-static"] == ("0.86",)
        assert_consistent(runner)


async def test_a_bracket_that_closes_is_a_finding_with_floor_and_ceiling(tmp_path: Path) -> None:
    high, low = NARROW[0].model_copy(update={"above": 0.86}), NARROW[1].model_copy(update={"below": 0.87})
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(high, low)) as runner:
        assert await runner.run() == 0
        assert {outcome for name, outcome in outcomes(runner).items() if "cache" in name} == {Outcome.FAILED}
        last = f"cache-q8_0-mem-fraction-static-{'0.87'}"
        assert kinds_of(runner, last) == ["choose", "block"]
        statements = [found.statement for found in runner.store.findings(runner.session_id)]
        assert any("another --mem-fraction-static does not help: no value is left" in one for one in statements)
        assert any("(floor 0.86, ceiling 0.87)" in one for one in statements)
        text = markdown(runner.store, runner.session_id)
        assert "another value: --cache q8_0: failed to start." in text
        assert "it goes on as cache-q8_0-mem-fraction-static-0.84" in text
        assert_consistent(runner)


async def test_an_interrupted_session_follows_the_advice_exactly_once(tmp_path: Path) -> None:
    with sim_session(tmp_path / "whole", CANDIDATE, config=ONE_POINT, scenario=scenario(*NARROW)) as runner:
        assert await runner.run() == 0
        undisturbed = outcomes(runner)
    point, killed = 3, True
    while killed:
        folder = tmp_path / str(point)
        killed = await died_at(folder, point, CANDIDATE, config=ONE_POINT, scenario=scenario(*NARROW))
        with sim_session(folder, CANDIDATE, config=ONE_POINT, scenario=scenario(*NARROW)) as runner:
            if killed:
                assert await runner.run() == 0
            assert outcomes(runner) == undisturbed
            assert Counter(todo.id for todo in runner.store.todos(runner.session_id)).most_common(1)[0][1] == 1
            assert_consistent(runner)
        point += 19
    assert point > 60


# --- relatives ---

EP = flag("--ep-size", "8", id="ep", needs=("expert-parallel",), tags=("communication",), priority=0.9)
EPLB = flag("--eplb", "on", id="eplb", needs=("eplb", "expert-parallel"), tags=("communication",))
FREE = flag("--poll", "0", id="free", tags=("scheduling",))


async def test_a_crash_blocks_what_depends_on_the_same_thing_and_says_so(tmp_path: Path) -> None:
    broken = SimEffect(name="--ep-size", value="8", refuses=TILE)
    with sim_session(tmp_path, EP, EPLB, FREE, config=ONE_POINT, scenario=scenario(broken)) as runner:
        assert await runner.run() == 0
        relative = todo_of(runner, "eplb")
        assert relative.status is BLOCKED
        assert relative.reason.startswith("needs expert-parallel, which does not work here: ep failed to start, ")
        assert "shared memory, Required: 147456" in relative.reason
        (block,) = [d for d in runner.store.decisions(runner.session_id) if d["kind"] == "block"]
        assert block["reason"].endswith("; blocked with it: eplb (needs expert-parallel)")
        assert "free" in outcomes(runner) and "eplb" not in outcomes(runner)
        assert "blocked with it: eplb" in markdown(runner.store, runner.session_id)
        assert_consistent(runner)


async def test_the_rule_names_the_capability_that_is_lost(tmp_path: Path) -> None:
    pieces = flag("--pieces", "on", id="pieces", needs=("piecewise-graphs", "torch-compile"), priority=0.9)
    compiled = flag("--compile", "on", id="compiled", needs=("torch-compile",))
    broken = SimEffect(name="--pieces", value="on", refuses=UNTRACEABLE)
    with sim_session(tmp_path, pieces, compiled, FREE, config=ONE_POINT, scenario=scenario(broken)) as runner:
        assert await runner.run() == 0
        assert todo_of(runner, "compiled").status is BLOCKED
        assert "torch._dynamo.exc.Unsupported" in todo_of(runner, "compiled").reason
        assert "free" in outcomes(runner)
        assert_consistent(runner)


async def test_a_refused_value_blocks_nothing_else(tmp_path: Path) -> None:
    odd = SimEffect(name="--ep-size", value="8", refuses="x: error: argument --ep-size: invalid int value: '8'")
    with sim_session(tmp_path, EP, EPLB, config=ONE_POINT, scenario=scenario(odd)) as runner:
        assert await runner.run() == 0
        assert todo_of(runner, "ep").status is BLOCKED
        assert "eplb" in outcomes(runner)


# --- a server that complains, or dies, while it is measured ---


async def test_retracted_requests_void_the_run_and_the_server_starts_anew_before_the_next(tmp_path: Path) -> None:
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(shows(says=FULL, times=1))) as runner:
        assert await runner.run() == 0
        own = [m for m in runner.store.measurements(runner.session_id, "cache-q8_0") if m.arm == "candidate"]
        assert own[0].status is MeasurementStatus.INVALID
        assert own[0].reasons[0].startswith(f"{COMPLAINED}: oom-runtime: KV cache pool is full.")
        assert own[0].complaint is not None and own[0].complaint.rule == "sglang-memory-retracted"
        assert own[1].trial_id != own[0].trial_id
        assert outcomes(runner)["cache-q8_0"] is Outcome.BETTER
        assert_consistent(runner)


async def test_requests_that_are_retracted_again_lead_to_fewer_at_once(tmp_path: Path) -> None:
    full = SimEffect(name="--max-running-requests", value="*", above=1900, when=("--cache", "q8_0"), says=FULL)
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(full, shows())) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.WORSE
        assert kinds_of(runner, "cache-q8_0") == ["choose", "adjust"]
        assert outcomes(runner)["cache-q8_0-max-running-requests-1792"] is Outcome.BETTER
        assert_consistent(runner)


async def test_nonsense_at_a_good_speed_is_worse_and_blocked(tmp_path: Path) -> None:
    twin = flag("--poll", "0", id="twin", needs=("quantised-kv",))
    own = CANDIDATE.model_copy(update={"needs": ("quantised-kv",), "priority": 0.9})
    with sim_session(tmp_path, own, twin, config=ONE_POINT, scenario=scenario(shows(says=NAN))) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.WORSE
        assert kinds_of(runner, "cache-q8_0") == ["choose", "block"]
        assert todo_of(runner, "twin").status is BLOCKED
        own_runs = runner.store.measurements(runner.session_id, "cache-q8_0")
        assert [m.status for m in own_runs if m.arm == "candidate"] == [MeasurementStatus.INVALID]
        assert_consistent(runner)


async def test_an_engine_that_dies_under_load_is_tried_once_more_after_known_good(tmp_path: Path) -> None:
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=scenario(shows(says=DEAD, dies=True))) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.WORSE
        assert kinds_of(runner, "cache-q8_0") == ["choose", "block"]
        good = runner.store.role(runner.session_id, Role.ORIGINAL)
        launched = [words[2] == good for words in world_log(tmp_path) if words[0] == "launch"]
        assert launched == [False, True, False, True]
        assert_consistent(runner)


async def test_a_long_compilation_is_no_complaint(tmp_path: Path) -> None:
    world = scenario(shows(says=LATE_BROADCAST), engine="vllm")
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.BETTER
        assert all(m.complaint is None for m in runner.store.measurements(runner.session_id))


HUNG = SimEffect(name="--threads", value="1", says=COLLECTIVE.format(203441), unless=("--poll", "0"))
"""Known-good, once it was launched by us, hangs in a collective."""


async def test_known_good_that_complains_once_starts_anew_and_the_night_goes_on(tmp_path: Path) -> None:
    world = scenario(HUNG.model_copy(update={"times": 1}))
    with sim_session(tmp_path, flag("--poll", "0"), flag("--cache", "1"), config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        spoilt = {m.trial_id for m in runner.store.measurements(runner.session_id) if m.complaint is not None}
        assert len(spoilt) == 1
        last = runner.store.trials(runner.session_id)[-1]
        assert last.id not in spoilt
        assert await known_good_serves(runner)
        assert_consistent(runner)


async def test_known_good_that_complains_again_ends_the_session(tmp_path: Path) -> None:
    first, second = flag("--poll", "0", priority=0.9), flag("--cache", "1")
    with sim_session(tmp_path, first, second, config=ONE_POINT, scenario=scenario(HUNG)) as runner:
        assert await runner.run() == 4
        row = runner.store.session(runner.session_id)
        assert row.status is SessionStatus.STOPPED
        assert "trying on cannot help: hang: " in row.reason
        assert await known_good_serves(runner)


async def test_a_gpu_that_is_lost_under_load_calls_a_person_and_blames_no_setting(tmp_path: Path) -> None:
    world = scenario(shows(says=LOST_GPU, times=1))
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=world) as runner:
        with pytest.raises(NeedsHuman, match="wants a person"):
            await runner.run()
        assert await known_good_serves(runner)
        assert todo_of(runner, "cache-q8_0").status is TodoStatus.IN_PROGRESS
    with sim_session(tmp_path, CANDIDATE, config=ONE_POINT, scenario=world) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["cache-q8_0"] is Outcome.BETTER
        assert_consistent(runner)


# --- direction ---

COMMUNICATION: tuple[Experiment, ...] = tuple(
    flag("--nccl", value, tags=("communication",), priority=priority)
    for value, priority in (("a", 0.9), ("b", 0.85), ("c", 0.8))
)


async def test_two_that_do_nothing_turn_the_search_to_another_topic(tmp_path: Path) -> None:
    useless = SimEffect(name="--nccl", value="*", ratio={"*": 0.95})
    steps = flag("--poll", "0", id="steps", tags=("scheduling",), priority=0.25)
    with sim_session(tmp_path, *COMMUNICATION, steps, config=ONE_POINT, scenario=scenario(useless)) as runner:
        assert await runner.run() == 0
        log = decision_log(runner.store, runner.session_id)
        (pivot,) = [entry for entry in log if entry["kind"] == "pivot"]
        assert pivot["what"] == "turn away from communication; first in line is --poll 0 (scheduling)"
        assert "nccl-a" in pivot["reason"] and "nccl-b" in pivot["reason"]
        judged = {m.id for name in ("nccl-a", "nccl-b") for m in runner.store.measurements(runner.session_id, name)}
        assert {item["id"] for item in pivot["evidence"]} <= judged
        chosen = [entry["subject"] for entry in log if entry["kind"] == "choose"]
        assert chosen[chosen.index("nccl-b") + 1 :][:2] == ["steps", "nccl-c"]
        statements = [found.statement for found in runner.store.findings(runner.session_id)]
        assert any(one.startswith("communication is not the bottleneck here: nccl-a ") for one in statements)
        assert "direction: turn away from communication" in markdown(runner.store, runner.session_id)
        assert_consistent(runner)
