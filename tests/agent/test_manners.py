"""How the users of a server are spared, in whole sessions on the simulated target, whose own log is the witness."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agent.config import MannersSection, SessionConfig
from agent.doctor import examine
from agent.evidence import comparison_of
from agent.judge import assess
from agent.manners import LASTING, UNDRAIN_TRIES, UNMEASURED, unmeasured, within_ceiling
from agent.progress import Silent
from agent.report import lasting, markdown
from agent.session import Runner
from state.errors import DrainFailed, ForeignChange, ForeignTraffic, NeedsHuman
from state.models import Arm, DecisionKind, Outcome, Role, SessionStatus, TodoStatus
from tests.agent.sim import CONFIG, SCENARIO, Listed, flag, sim_session
from tests.agent.test_loop import Killed, assert_consistent, outcomes, world_log
from tools.simulated import SimulatedTarget
from tools.target import Drained

pytestmark = pytest.mark.anyio

FASTER, SLOWER = flag("--threads", "2"), flag("--threads", "8")
COMMANDS = {"drain": ("balancer", "out"), "undrain": ("balancer", "in"), "drained": ("balancer", "is-out")}


def mannered(config: SessionConfig = CONFIG, **rules: object) -> SessionConfig:
    return config.model_copy(update={"manners": MannersSection.model_validate(rules)})


DRAINED = mannered(**COMMANDS)


def change_world(folder: Path, **values: object) -> None:
    path = folder / "world" / "world.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def during(log: Iterable[list[str]]) -> Iterable[tuple[list[str], bool]]:
    """Each launch and run, with whether the server was drained then."""
    out = False
    for words in log:
        if words[0] in ("out", "in"):
            assert out == (words[0] == "in"), "drained and given back in turns"
            out = words[0] == "out"
        else:
            yield words, out
    assert not out, "drained at the end"


# --- when it is drained -----------------------------------------------------------------------------------


async def test_every_restart_happens_drained_and_the_baseline_does_not(tmp_path: Path) -> None:
    with sim_session(tmp_path, FASTER, SLOWER, config=DRAINED) as runner:
        assert await runner.run() == 0
        seen = list(during(world_log(tmp_path)))
        assert {out for words, out in seen if words[0] == "launch"} == {True}
        baseline = [m.id for m in runner.store.measurements(runner.session_id, "baseline")]
        assert {out for words, out in seen if words[1].rpartition("-")[2] in baseline} == {False}
        assert [words[0] for words in world_log(tmp_path)][-1] == "in"
        assert_consistent(runner)


async def test_for_load_every_run_happens_drained_as_well(tmp_path: Path) -> None:
    with sim_session(tmp_path, FASTER, config=mannered(**COMMANDS, drain_for="load")) as runner:
        assert await runner.run() == 0
        assert {out for words, out in during(world_log(tmp_path)) if words[0] in ("launch", "run")} == {True}
        assert_consistent(runner)


async def test_a_load_above_the_ceiling_happens_drained(tmp_path: Path) -> None:
    with sim_session(tmp_path, SLOWER, config=mannered(**COMMANDS, max_concurrency=4)) as runner:
        assert await runner.run() == 0
        seen = list(during(world_log(tmp_path)))
        assert {out for words, out in seen if words[0] == "run" and words[2] == "c8"} == {True}


async def test_without_a_drain_such_a_load_point_is_left_out_and_named(tmp_path: Path) -> None:
    objective = CONFIG.workload.objective.model_copy(update={"at": ("c1",)})
    low = CONFIG.model_copy(update={"workload": CONFIG.workload.model_copy(update={"objective": objective})})
    config = mannered(low, max_concurrency=4)
    with sim_session(tmp_path, SLOWER, config=config) as runner:
        assert await runner.run() == 0
        assert {words[2] for words in world_log(tmp_path) if words[0] == "run"} == {"c1"}
        (note,) = runner.store.notes(runner.session_id, UNMEASURED)
        assert note == unmeasured(config) and note.startswith("unmeasured at C=8 (c8): ")
        assert f"- {note}" in markdown(runner.store, runner.session_id)
        assert_consistent(runner)
    assert within_ceiling(within_ceiling(config)) == within_ceiling(config)
    assert unmeasured(mannered(low, max_concurrency=8)) == ""


# --- what goes wrong --------------------------------------------------------------------------------------


async def test_a_drain_that_fails_leaves_the_server_untouched(tmp_path: Path) -> None:
    broken = SCENARIO.model_copy(update={"drain_fails": True})
    with sim_session(tmp_path, FASTER, scenario=broken, config=DRAINED) as runner:
        with pytest.raises(DrainFailed, match="could not be drained for a restart") as failed:
            await runner.run()
        assert "no such pool" in failed.value.tail and "balancer out" in str(failed.value)
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.REFUSED, 5)
        assert "launch" not in [words[0] for words in world_log(tmp_path)]
    with sim_session(tmp_path, FASTER, config=DRAINED) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["threads-2"] is Outcome.BETTER
        assert_consistent(runner)


async def test_a_drain_that_fails_in_the_middle_does_not_keep_known_good_from_coming_back(tmp_path: Path) -> None:
    def spoil(name: str) -> None:
        if name.endswith("T2:ready"):  # somebody gives the server back, and it cannot be drained again
            change_world(tmp_path, drained=False)
            runner.target.scenario = SCENARIO.model_copy(update={"drain_fails": True})  # type: ignore[attr-defined]

    with sim_session(tmp_path, FASTER, config=DRAINED, fault=spoil) as runner:
        with pytest.raises(DrainFailed):
            await runner.run()
        serving = await runner.target.serving()
        assert serving is not None
        assert serving.spec.fingerprint == runner.store.role(runner.session_id, Role.KNOWN_GOOD)
        notes = runner.store.notes(runner.session_id, "")
        assert any(note.startswith("restored without draining: ") for note in notes)


async def test_giving_it_back_is_tried_again_before_a_person_is_called(tmp_path: Path) -> None:
    for failures in (UNDRAIN_TRIES - 1, UNDRAIN_TRIES):
        folder = tmp_path / str(failures)
        hard = SCENARIO.model_copy(update={"undrain_fails": failures})
        with sim_session(folder, SLOWER, scenario=hard, config=DRAINED) as runner:
            if failures < UNDRAIN_TRIES:
                assert await runner.run() == 0
                list(during(world_log(folder)))
                assert_consistent(runner)
                continue
            with pytest.raises(NeedsHuman, match="still drained") as needed:
                await runner.run()
            assert "balancer in" in str(needed.value) and "try again later" in needed.value.tail
            row = runner.store.session(runner.session_id)
            assert (row.status, row.exit_code) == (SessionStatus.NEEDS_HUMAN, 6)
            assert (await runner.target.drained()).ours
        with sim_session(folder, SLOWER, config=DRAINED) as runner:
            assert await runner.run() == 0
            list(during(world_log(folder)))


async def test_somebody_elses_server_stays_as_it_is_and_the_refusal_says_that_it_is_drained(tmp_path: Path) -> None:
    def intrude(name: str) -> None:
        if name.endswith("T2:ready"):
            server = json.loads((tmp_path / "world" / "world.json").read_text())["server"]
            change_world(tmp_path, server={**server, "key": "foreign", "pid": 4242})

    with sim_session(tmp_path, FASTER, config=DRAINED, fault=intrude) as runner:
        with pytest.raises(ForeignChange) as refused:
            await runner.run()
        assert "still drained by us; to end that: balancer in" in str(refused.value)
        assert "balancer in" in runner.store.session(runner.session_id).reason
        assert (await runner.target.drained()).ours


# --- whatever dies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before-intent", "after-intent", "after-act", "after-outcome"])
@pytest.mark.parametrize("number", [1, 2])
async def test_killed_around_a_drain_it_is_drained_once(tmp_path: Path, number: int, point: str) -> None:
    def die(name: str) -> None:
        if name == f"drain-{number}:{point}":
            raise Killed(name)

    with sim_session(tmp_path, SLOWER, config=DRAINED, fault=die) as runner, pytest.raises(Killed):
        await runner.run()
    with sim_session(tmp_path, SLOWER, config=DRAINED) as runner:
        assert await runner.run() == 0
        assert {out for words, out in during(world_log(tmp_path)) if words[0] == "launch"} == {True}
        assert [words for words in world_log(tmp_path) if words[0] == "out"] == [["out", "1"]]
        assert_consistent(runner)


async def test_what_the_watcher_gave_back_is_drained_anew_by_the_next_agent(tmp_path: Path) -> None:
    def break_down(name: str) -> None:
        if name.endswith("T2:ready"):
            raise ZeroDivisionError("a defect")

    with sim_session(tmp_path, SLOWER, config=DRAINED, fault=break_down) as runner:
        with pytest.raises(ZeroDivisionError):
            await runner.run()
        assert await runner.target.drained() == Drained(ours=False, seen=False)
    with sim_session(tmp_path, SLOWER, config=DRAINED) as runner:
        assert await runner.run() == 0
        assert [words[0] for words in world_log(tmp_path) if words[0] in ("out", "in")] == ["out", "in"] * 2
        assert_consistent(runner)


async def test_stopped_and_restored_it_is_given_back(tmp_path: Path) -> None:
    def stop(name: str) -> None:
        if name.endswith("T2:ready"):
            runner.stop.set()

    with sim_session(tmp_path, FASTER, config=DRAINED, fault=stop) as runner:
        assert await runner.run() == 4
        list(during(world_log(tmp_path)))
        assert_consistent(runner)

    def die(name: str) -> None:
        if name.endswith("T4:ready"):
            raise Killed(name)

    with sim_session(tmp_path, FASTER, config=DRAINED, fault=die) as runner, pytest.raises(Killed):
        await runner.run()
    with sim_session(tmp_path, FASTER, config=DRAINED) as runner:
        assert (await runner.target.drained()).ours
        await runner.put_back(original=True)
        list(during(world_log(tmp_path)))


# --- requests in flight -----------------------------------------------------------------------------------


class Patient(Silent):
    """Counts how often it was waited for requests in flight; after so many looks they have ended."""

    def __init__(self, folder: Path, looks: int) -> None:
        self.folder, self.looks, self.seen = folder, looks, 0

    def tick(self, text: str, done: float, of: float) -> None:
        if text.startswith("waiting for requests in flight: 3 requests in flight"):
            self.seen += 1
            if self.seen == self.looks:
                change_world(self.folder, traffic=0)


def _launch_due(runner: Runner) -> bool:
    under_way = runner.store.open_comparison(runner.session_id)
    if under_way is None or not under_way.experiment.tries:
        return False
    need = assess(comparison_of(runner.store, runner.session_id, runner.hands.config, under_way.experiment.id)).need
    return need is not None and need.arm is Arm.CANDIDATE


def crowded(runner: Callable[[], Runner], folder: Path, until: str) -> Callable[[str], None]:
    """Three requests are in flight when the first launch is due, and end at a point."""
    come: list[str] = []

    def fault(name: str) -> None:
        if name == "node:apply" and not come and _launch_due(runner()):
            come.append(name)
            change_world(folder, traffic=3)
        if name.endswith(until):
            change_world(folder, traffic=0)

    return fault


async def test_a_restart_waits_for_requests_in_flight_for_as_long_as_it_takes(tmp_path: Path) -> None:
    config = mannered(wait_inflight_s=4.0)
    with sim_session(tmp_path, SLOWER, config=config, fault=crowded(lambda: runner, tmp_path, "never")) as runner:
        runner.hands.progress = patient = Patient(tmp_path, looks=7)
        assert await runner.run() == 0
        assert patient.seen == 7
        assert outcomes(runner)["threads-8"] is Outcome.WORSE
        assert_consistent(runner)


async def test_or_the_experiment_is_void_and_the_next_one_comes(tmp_path: Path) -> None:
    config = mannered(wait_inflight_s=4.0, when_busy="skip")
    fault = crowded(lambda: runner, tmp_path, "node:settle")
    with sim_session(tmp_path, SLOWER, flag("--poll", "0"), config=config, fault=fault) as runner:
        assert await runner.run() == 0
        todos = {todo.id: todo for todo in runner.store.todos(runner.session_id)}
        skipped = [todo for todo in todos.values() if todo.status is TodoStatus.SKIPPED]
        (void,) = [d for d in runner.store.decisions(runner.session_id) if d["kind"] == DecisionKind.VOID]
        assert [todo.id for todo in skipped] == [void["subject"]]
        assert "busy: 3 requests in flight of somebody else after 4 s" in void["reason"]
        assert void["subject"] not in {t.experiment_id for t in runner.store.trials(runner.session_id)}
        assert len(outcomes(runner)) == 3, "the baseline and both experiments"
        assert_consistent(runner)


async def test_only_who_says_so_restarts_a_server_under_its_users(tmp_path: Path) -> None:
    fault = crowded(lambda: runner, tmp_path, "T2:ready")
    with sim_session(tmp_path, SLOWER, config=mannered(wait_inflight_s=0), fault=fault) as runner:
        runner.hands.progress = patient = Patient(tmp_path, looks=1)
        assert await runner.run() == 0
        assert patient.seen == 0


async def test_known_good_comes_back_after_the_wait_in_any_case(tmp_path: Path) -> None:
    def crowd(name: str) -> None:
        if name in ("node:heal", "node:observe"):
            change_world(tmp_path, traffic=3 if name == "node:heal" else 0)

    with sim_session(tmp_path, SLOWER, config=mannered(wait_inflight_s=4.0), fault=crowd) as runner:
        assert await runner.run() == 0
        trials = runner.store.trials(runner.session_id)
        notes = [note for trial in trials for note in runner.store.notes(runner.session_id, trial.id)]
        assert [note for note in notes if "was replaced under its users: busy: 3 requests" in note]
        assert_consistent(runner)


# --- requests of others that are tolerated ----------------------------------------------------------------


@pytest.mark.parametrize("rps", [0.3, 0.7])
async def test_so_many_requests_of_others_are_tolerated(tmp_path: Path, rps: float) -> None:
    with sim_session(tmp_path, SLOWER, config=mannered(max_foreign_rps=0.5)) as runner:
        change_world(tmp_path, rps=rps)
        if rps > 0.5:
            with pytest.raises(ForeignTraffic, match="keeps using") as refused:
                await runner.run()
            assert "0.70 requests a second, where 0.5 are allowed" in str(refused.value)
        else:
            assert await runner.run() == 0
            said = "up to 0.5 requests of others a second were tolerated"
            assert said in markdown(runner.store, runner.session_id)
            assert_consistent(runner)


# --- for good ---------------------------------------------------------------------------------------------


async def test_a_winner_is_made_to_last_only_where_the_session_file_says_so(tmp_path: Path) -> None:
    for persist in (False, True):
        folder = tmp_path / str(persist)
        with sim_session(folder, FASTER, config=mannered(persist=persist)) as runner:
            assert await runner.run() == 0
            final = runner.store.role(runner.session_id, Role.FINAL)
            world = json.loads((folder / "world" / "world.json").read_text())
            assert world.get("persisted") == (final if persist else None)
            last = runner.store.decisions(runner.session_id)[-1]["reason"]
            commands = lasting(runner.store, runner.session_id)
            assert commands == ("" if persist else "sim-server --parallel 1 --threads 2"), commands
            assert ("comes back after a reboot: the world starts it" in last) is persist
            assert ("## To make it last" in markdown(runner.store, runner.session_id)) is not persist
            assert_consistent(runner)
            await runner.put_back(original=True)
            assert json.loads((folder / "world" / "world.json").read_text()).get("persisted") is None


async def test_where_nothing_was_kept_nothing_lasts(tmp_path: Path) -> None:
    with sim_session(tmp_path, SLOWER, config=mannered(persist=True)) as runner:
        assert await runner.run() == 0
        assert json.loads((tmp_path / "world" / "world.json").read_text()).get("persisted") is None
        assert runner.store.notes(runner.session_id, LASTING) == []


# --- before it begins -------------------------------------------------------------------------------------


class Spoiled(SimulatedTarget):
    """A simulated host with a probe that says something else."""

    says = Drained(ours=False, seen=False)

    async def drained(self) -> Drained:
        return self.says


async def test_doctor_says_what_would_be_drained_and_whether_the_probe_works(tmp_path: Path) -> None:
    target = Spoiled(tmp_path / "world", SCENARIO)
    config = mannered(**COMMANDS, max_concurrency=4, persist=True)
    for says, status, word in (
        (Drained(ours=False, seen=False), "ok", "it is not drained now"),
        (Drained(ours=False, seen=True), "ok", "by somebody else"),
        (Drained(ours=False, seen=None), "ok", "there is no probe"),
        (Drained(ours=True, seen=True), "warning", "still drained by us"),
        (Drained(ours=False, seen=None, trouble="exit 127"), "failed", "exit 127"),
    ):
        target.says = says
        seen = await examine(target, config, Listed(), tmp_path / "state.db")
        checks = {check.name: check for check in seen.checks}
        assert checks["drain"].status == status
        assert word in checks["drain"].text and "`balancer out` before restarts" in checks["drain"].text
        assert checks["load ceiling"].status == "ok"
        assert checks["persist"].status == "warning", "nobody holds a simulated server"
        assert seen.exit_code == (3 if status == "failed" else 0)
    assert world_log(tmp_path) == []


async def test_doctor_names_what_stays_unmeasured_and_says_nothing_without_manners(tmp_path: Path) -> None:
    target = SimulatedTarget(tmp_path / "world", SCENARIO)
    seen = await examine(target, mannered(max_concurrency=4), Listed(), tmp_path / "state.db")
    (check,) = [check for check in seen.checks if check.name == "load ceiling"]
    assert check.status == "warning" and "unmeasured at C=8 (c8)" in check.text and check.do
    plain = await examine(target, CONFIG, Listed(), tmp_path / "state.db")
    assert {"drain", "load ceiling", "persist"} & {check.name for check in plain.checks} == set()
