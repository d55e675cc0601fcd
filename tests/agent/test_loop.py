"""The loop on the simulated target: what it decides, and that nothing that dies makes it repeat or lose anything."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agent.inbox import ask_to_stop
from agent.session import Runner
from agent.verify import Result, verify
from state.errors import ForeignChange, NeedsHuman
from state.models import Experiment, MeasurementStatus, Outcome, Role, SessionStatus, TodoStatus
from state.projection import TABLES, fold
from state.replay import decision_log
from tests.agent.sim import CONFIG, ONE_POINT, SCENARIO, flag, sim_session
from tests.state.test_store import dump
from tools.simulated import SimEffect

pytestmark = pytest.mark.anyio


class Killed(BaseException):
    """Stands for SIGKILL where a real one would end pytest too; the crash suite sends real ones."""


def world_log(folder: Path) -> list[list[str]]:
    log = folder / "world" / "world.log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def serving(folder: Path) -> dict[str, object]:
    server: dict[str, object] = json.loads((folder / "world" / "world.json").read_text())["server"]
    return server


def change_world(folder: Path, **server: object) -> None:
    path = folder / "world" / "world.json"
    world = json.loads(path.read_text())
    world["server"] = None if server == {"gone": True} else {**world["server"], **server}
    path.write_text(json.dumps(world))


def outcomes(runner: Runner) -> dict[str, Outcome]:
    return {name: verdict.outcome for name, verdict in runner.store.verdicts(runner.session_id).items()}


def assert_consistent(runner: Runner) -> None:
    """Invariants of every end: tables fold, effects closed, no run or launch twice, each verdict computed again."""
    store, sid = runner.store, runner.session_id
    again = fold(store.db)
    for table in TABLES:
        assert dump(again, table) == dump(store.db, table)
    again.close()
    assert store.db.execute("SELECT count(*) FROM effects WHERE outcome IS NULL").fetchone()[0] == 0
    seen = Counter(tuple(words[:2]) for words in world_log(store.path.parent))
    assert [key for key, count in seen.items() if count > 1] == []
    valid = [m for m in store.measurements(sid) if m.status is MeasurementStatus.VALID]
    cells = Counter((m.experiment_id, m.arm, m.block, m.run, m.load_point) for m in valid)
    assert [cell for cell, count in cells.items() if count > 1] == []
    assert [check for check in verify(store, sid).checks if check.result is not Result.SAME] == []


async def test_a_whole_session_decides_each_experiment_and_ends_improved(tmp_path: Path) -> None:
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
        said = outcomes(runner)
        assert said["baseline"] is Outcome.OBSERVED
        assert said["threads-2"] is Outcome.BETTER
        assert said["threads-64"] is Outcome.COLLAPSED
        assert said["cache-q8_0"] is Outcome.FAILED
        assert said["spec-ngram"] is Outcome.WORSE  # better at its objective, but it harms another load point
        assert said["poll-0"] in (Outcome.NO_DIFFERENCE, Outcome.INCONCLUSIVE)
        assert said["close-out"] is Outcome.BETTER
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.DONE, 0)
        target = await runner.target.serving()
        assert target is not None
        assert target.spec.fingerprint == runner.store.role(runner.session_id, Role.FINAL)
        assert target.spec.flags["--threads"] == ("2",)
        assert_consistent(runner)


async def test_a_refused_flag_is_blocked_without_stopping_the_server(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--unknown", "1")) as runner:
        assert await runner.run() == 0
        (todo,) = [t for t in runner.store.todos(runner.session_id) if t.id == "unknown-1"]
        assert todo.status is TodoStatus.BLOCKED
        assert "does not know --unknown" in todo.reason
        assert [words for words in world_log(tmp_path) if words[0] == "launch"] == []


async def test_observation_comes_before_anything_that_restarts(tmp_path: Path) -> None:
    with sim_session(tmp_path) as runner:
        await runner.run()
        kinds = [words[0] for words in world_log(tmp_path)]
        first_launch = kinds.index("launch")
        points = len(CONFIG.workload.load_points)
        assert kinds[:first_launch] == ["run"] * (CONFIG.judge.baseline_runs * points)


async def test_every_decision_names_its_reason_and_existing_evidence(tmp_path: Path) -> None:
    with sim_session(tmp_path) as runner:
        await runner.run()
        log = decision_log(runner.store, runner.session_id)
        known = {m.id for m in runner.store.measurements(runner.session_id)}
        known |= {t.id for t in runner.store.trials(runner.session_id)}
        assert [entry["id"] for entry in log] == [f"D{n + 1}" for n in range(len(log))]
        for entry in log:
            assert entry["reason"]
            assert {item["id"] for item in entry["evidence"]} <= known
        judged = [entry for entry in log if entry["kind"] in ("keep", "revert")]
        assert judged and all(entry["evidence"] for entry in judged)


async def _run_until(folder: Path, point: int, experiments: tuple[Experiment, ...]) -> bool:
    """Run until the `point`-th fault point and die there; False when the session ended before it."""
    passed = 0

    def die(name: str) -> None:
        nonlocal passed
        if passed == point:
            raise Killed(name)
        passed += 1

    try:
        with sim_session(folder, *experiments, config=ONE_POINT, fault=die) as runner:
            await runner.run()
    except Killed:
        return True
    return False


async def test_the_checkpoint_file_may_vanish_between_any_two_steps(tmp_path: Path) -> None:
    experiments = (flag("--threads", "2"),)
    for point in range(0, 60, 7):
        folder = tmp_path / str(point)
        assert await _run_until(folder, point, experiments)
        (folder / "graph.db").unlink(missing_ok=True)
        with sim_session(folder, *experiments, config=ONE_POINT) as runner:
            assert await runner.run() == 0
            assert outcomes(runner)["threads-2"] is Outcome.BETTER


async def test_a_stop_request_brings_known_good_back_and_resume_goes_on(tmp_path: Path) -> None:
    def ask(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            ask_to_stop(tmp_path / "state.db", runner.session_id)

    with sim_session(tmp_path, fault=ask) as runner:
        assert await runner.run() == 4
        assert runner.store.session(runner.session_id).status is SessionStatus.STOPPED
        now = await runner.target.serving()
        assert now is not None
        assert now.spec.fingerprint == runner.store.role(runner.session_id, Role.KNOWN_GOOD)
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["threads-2"] is Outcome.BETTER
        assert_consistent(runner)


async def test_a_dead_server_is_healed_and_the_log_says_so(tmp_path: Path) -> None:
    killed: list[str] = []

    def kill_server(name: str) -> None:
        if name == "node:choose" and not killed:
            killed.append(name)
            change_world(tmp_path, state="hung")

    with sim_session(tmp_path, flag("--threads", "2"), fault=kill_server) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["threads-2"] is Outcome.BETTER


async def test_somebody_elses_server_is_left_alone(tmp_path: Path) -> None:
    seen: list[str] = []

    def replace(name: str) -> None:
        seen.append(name)
        if seen.count("node:observe") == 3:
            seen.append("node:observe")
            change_world(tmp_path, key="foreign", pid=4242, state="running")

    with sim_session(tmp_path, fault=replace) as runner:
        with pytest.raises(ForeignChange, match="neither the adopted one"):
            await runner.run()
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.REFUSED, 5)
        assert serving(tmp_path)["pid"] == 4242


async def test_a_noisy_host_ends_restored_and_says_so(tmp_path: Path) -> None:
    scenario = SCENARIO.model_copy(update={"foreign_cores": 1.0})
    with sim_session(tmp_path, scenario=scenario) as runner:
        assert await runner.run() == 0
        row = runner.store.session(runner.session_id)
        assert "too noisy to judge" in row.reason
        assert runner.store.role(runner.session_id, Role.FINAL) == runner.store.role(runner.session_id, Role.ORIGINAL)
        assert [words for words in world_log(tmp_path) if words[0] == "launch"] == []


async def test_a_candidate_that_loses_requests_is_worse_and_a_server_that_always_did_is_no_baseline(
    tmp_path: Path,
) -> None:
    losing = SimEffect(name="--poll", value="0", ratio={"*": 1.5}, fails=2)
    scenario = SCENARIO.model_copy(update={"effects": (losing,)})
    with sim_session(tmp_path / "candidate", flag("--poll", "0"), config=ONE_POINT, scenario=scenario) as runner:
        assert await runner.run() == 0
        verdict = runner.store.verdicts(runner.session_id)["poll-0"]
        assert verdict.outcome is Outcome.WORSE
        assert "2 of 16 requests failed (2 × http-500)" in verdict.reason
        assert_consistent(runner)
    always = scenario.model_copy(update={"flags": SCENARIO.flags | {"--poll": ("0",)}})
    with sim_session(tmp_path / "always", flag("--threads", "2"), config=ONE_POINT, scenario=always) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["baseline"] is Outcome.INVALID


async def test_known_good_that_will_not_start_needs_a_human_and_names_the_command(tmp_path: Path) -> None:
    wont = SCENARIO.effects[0].model_copy(update={"name": "--threads", "value": "1", "refuses": "cannot load model"})
    refusing = (*SCENARIO.effects, wont)
    scenario = SCENARIO.model_copy(update={"effects": refusing})
    with sim_session(tmp_path, flag("--threads", "64"), scenario=scenario) as runner:
        with pytest.raises(NeedsHuman) as raised:
            await runner.run()
        assert "sim-server" in raised.value.where["command"]
        assert runner.store.session(runner.session_id).exit_code == 6
        assert "the known-good configuration does not start any more" in (tmp_path / "world" / "world.log").read_text()


async def test_the_budget_ends_the_list_but_never_the_close_out(tmp_path: Path) -> None:
    budget = CONFIG.policy.budget.model_copy(update={"experiments": 1})
    policy = CONFIG.policy.model_copy(update={"budget": budget})
    config = CONFIG.model_copy(update={"policy": policy})
    with sim_session(tmp_path, flag("--threads", "2"), flag("--poll", "0"), config=config) as runner:
        assert await runner.run() == 0
        statuses = {t.id: t.status for t in runner.store.todos(runner.session_id)}
        assert sorted(statuses.values()).count(TodoStatus.SKIPPED) == 1
        skipped = [t for t in runner.store.todos(runner.session_id) if t.status is TodoStatus.SKIPPED]
        assert "all 1 experiments" in skipped[0].reason


async def test_the_same_configuration_in_another_order_is_not_tried_twice(tmp_path: Path) -> None:
    one = flag("--threads", "8", id="a")
    two = flag("--threads", "8", id="b")
    with sim_session(tmp_path, one, two) as runner:
        await runner.run()
        reasons = {t.id: t.reason for t in runner.store.todos(runner.session_id)}
        assert "tried as a" in reasons["b"]


PAIRED = SCENARIO.model_copy(
    update={
        "effects": (
            SimEffect(name="--threads", value="2", ratio={"*": 0.7}, unless=("--poll", "0")),
            SimEffect(name="--threads", value="2", ratio={"*": 1.8}, when=("--poll", "0")),
        )
    }
)


async def test_a_pair_that_helps_only_together_is_found_and_explained(tmp_path: Path) -> None:
    ideas = (flag("--threads", "2", tags=("threads",)), flag("--poll", "0", tags=("threads",), expected_gain=0.0))
    refining = CONFIG.model_copy(update={"planner": CONFIG.planner.model_copy(update={"refine": True})})
    with sim_session(tmp_path, *ideas, scenario=PAIRED, config=refining) as runner:
        assert await runner.run() == 0
        said = outcomes(runner)
        assert {said["threads-2"], said["poll-0"]} <= {Outcome.WORSE, Outcome.NO_DIFFERENCE, Outcome.INCONCLUSIVE}
        kept = [todo for todo in runner.store.todos(runner.session_id) if said.get(todo.id) is Outcome.BETTER]
        together = next(todo for todo in kept if todo.experiment.source.kind == "refinement")
        assert {str(change) for change in together.experiment.changes} == {"--threads 2", "--poll 0"}
        log = decision_log(runner.store, runner.session_id)
        (why,) = [entry for entry in log if entry["kind"] == "refine" and f"{together.id}:" in entry["reason"]]
        assert "never tried together" in why["reason"]
        assert log.index(why) < next(i for i, entry in enumerate(log) if entry["subject"] == together.id)
        assert_consistent(runner)


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_an_agent_that_dies_while_it_refines_adds_nothing_twice(tmp_path: Path, nth: int) -> None:
    ideas = (flag("--threads", "2", tags=("threads",)), flag("--poll", "0", tags=("threads",), expected_gain=0.0))
    refining = ONE_POINT.model_copy(update={"planner": ONE_POINT.planner.model_copy(update={"refine": True})})
    passed: Counter[str] = Counter()

    def die(name: str) -> None:
        passed[name] += 1
        if name == "node:choose" and passed["node:refine"] == nth and not passed["died"]:
            passed["died"] += 1
            raise Killed(name)  # right after the additions and their decision were written

    with sim_session(tmp_path, *ideas, scenario=PAIRED, config=refining, fault=die) as runner:
        with pytest.raises(Killed):
            await runner.run()
        before = [todo.id for todo in runner.store.todos(runner.session_id)]
    with sim_session(tmp_path, *ideas, scenario=PAIRED, config=refining) as runner:
        assert await runner.run() == 0
        listed = [todo.id for todo in runner.store.todos(runner.session_id)]
        assert listed[: len(before)] == before
        assert len(set(listed)) == len(listed)
        kept = [
            todo for todo in runner.store.todos(runner.session_id) if outcomes(runner).get(todo.id) is Outcome.BETTER
        ]
        assert any({str(change) for change in todo.experiment.changes} == {"--threads 2", "--poll 0"} for todo in kept)
        assert_consistent(runner)
