"""How a night ends or is disturbed on the simulated target: proven ends, other users, lost hosts, reboots, defects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.evidence import CONFIRM, RESTORE
from agent.inbox import ask_to_stop
from agent.session import Runner
from state.errors import ForeignTraffic, HostUnreachable, OutcomeUnknown
from state.models import DecisionKind, MeasurementStatus, Role, SessionStatus
from tests.agent.sim import CONFIG, SCENARIO, flag, sim_session
from tests.agent.test_loop import assert_consistent, world_log

pytestmark = pytest.mark.anyio


def change_world(folder: Path, **values: object) -> None:
    path = folder / "world" / "world.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


async def serves(runner: Runner, role: Role) -> bool:
    serving = await runner.target.serving()
    return serving is not None and serving.spec.fingerprint == runner.store.role(runner.session_id, role)


def kinds(runner: Runner) -> list[str]:
    return [decision["kind"] for decision in runner.store.decisions(runner.session_id)]


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_every_end_is_proven_and_confirmed_and_that_is_the_last_decision(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "8")) as runner:
        assert await runner.run() == 0
        last = runner.store.decisions(runner.session_id)[-1]
        runs = runner.store.measurements(runner.session_id, CONFIRM)
        assert last["kind"] == DecisionKind.END
        assert [run.load_point for run in runs] == list(CONFIG.workload.objective.at)
        assert set(last["evidence"]) >= {run.id for run in runs}
        (metrics,) = [run.metrics for run in runs]
        assert metrics is not None
        assert f"confirmed at c8: {metrics.output_tok_s:.1f} tok/s, " in last["reason"]
        assert "of its earlier runs" in last["reason"]
        assert_consistent(runner)


async def test_a_noisy_end_says_that_it_could_not_be_confirmed(tmp_path: Path) -> None:
    with sim_session(tmp_path, scenario=SCENARIO.model_copy(update={"foreign_cores": 1.0})) as runner:
        assert await runner.run() == 0
        last = runner.store.decisions(runner.session_id)[-1]
        assert "not confirmed at c8: noisy host" in last["reason"]


async def test_a_server_that_dies_under_the_confirming_run_is_brought_back(tmp_path: Path) -> None:
    hung: list[str] = []

    def hang(name: str) -> None:
        confirming = runner.store.measurements(runner.session_id, CONFIRM)
        if confirming and name.endswith("/run:after-act") and not hung:
            hung.append(name)
            world = json.loads((tmp_path / "world" / "world.json").read_text())
            change_world(tmp_path, server={**world["server"], "state": "hung"})

    with sim_session(tmp_path, flag("--threads", "8"), fault=hang) as runner:
        assert await runner.run() == 0
        assert hung
        assert await runner.target.trouble() is None
        confirming = runner.store.measurements(runner.session_id, CONFIRM)
        assert len({run.trial_id for run in confirming}) == 2
        assert runner.store.decisions(runner.session_id)[-1]["subject"] == confirming[-1].trial_id


async def test_a_stop_confirms_what_it_leaves_unless_asked_twice(tmp_path: Path) -> None:
    def ask(name: str) -> None:
        again = twice and name.endswith("/run:after-act") and runner.store.measurements(runner.session_id, CONFIRM)
        if again or name.endswith("M9/run:after-outcome"):
            ask_to_stop(tmp_path / str(twice) / "state.db", runner.session_id)

    for twice in (False, True):
        with sim_session(tmp_path / str(twice), fault=ask) as runner:
            assert await runner.run() == 4
            assert await serves(runner, Role.KNOWN_GOOD)
            last = runner.store.decisions(runner.session_id)[-1]
            assert last["kind"] == DecisionKind.INTERRUPTED
            (run,) = runner.store.measurements(runner.session_id, CONFIRM)
            assert (run.status is MeasurementStatus.LOST) is twice
            assert ("asked to stop at once" if twice else "confirmed at c8") in last["reason"]
        with sim_session(tmp_path / str(twice)) as runner:
            assert await runner.run() == 0
            assert_consistent(runner)


# --- somebody else uses the server ----------------------------------------------------------------------------------


async def test_somebody_elses_requests_pause_the_session_after_a_while(tmp_path: Path) -> None:
    def crowd(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            change_world(tmp_path, traffic=3)

    with sim_session(tmp_path, fault=crowd) as runner:
        with pytest.raises(ForeignTraffic, match="keeps using"):
            await runner.run()
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.REFUSED, 5)
        assert "3 requests in flight" in row.reason
        assert await serves(runner, Role.KNOWN_GOOD)
        taken = runner.store.measurements(runner.session_id)[-1]
        assert taken.status is MeasurementStatus.INVALID
        assert taken.reasons == ("foreign traffic: 3 requests in flight right after the run",)
    change_world(tmp_path, traffic=0)
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
        assert_consistent(runner)


async def test_somebody_who_leaves_in_time_only_costs_the_run(tmp_path: Path) -> None:
    def crowd(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            change_world(tmp_path, traffic=3)
        if name.endswith("M9:collected"):
            change_world(tmp_path, traffic=0)

    with sim_session(tmp_path, fault=crowd) as runner:
        assert await runner.run() == 0
        void = [m for m in runner.store.measurements(runner.session_id) if m.status is MeasurementStatus.INVALID]
        assert "foreign traffic" in void[0].reasons[0]
        assert_consistent(runner)


# --- the host goes and comes back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [HostUnreachable("the network is gone"), OutcomeUnknown("lost in mid-command")])
async def test_a_lost_connection_costs_nothing_but_time(tmp_path: Path, lost: Exception) -> None:
    with sim_session(tmp_path / "undisturbed", flag("--threads", "2")) as runner:
        assert await runner.run() == 0
        undisturbed = {name: v.outcome for name, v in runner.store.verdicts(runner.session_id).items()}
    points = ("M7/run:after-act", "T2:ready", "node:settle", "M9:collected")
    left = list(points)

    def cut(name: str) -> None:
        for point in left:
            if name.endswith(point):
                left.remove(point)
                raise lost

    with sim_session(tmp_path / "cut", flag("--threads", "2"), fault=cut) as runner:
        assert await runner.run() == 0
        assert left == []
        assert {name: v.outcome for name, v in runner.store.verdicts(runner.session_id).items()} == undisturbed
        assert kinds(runner).count(DecisionKind.RESUME) == len(points)
        assert_consistent(runner)


async def test_a_host_that_is_lost_again_and_again_without_a_step_between_ends_the_session(tmp_path: Path) -> None:
    def cut(name: str) -> None:
        if name == "node:plan":
            raise HostUnreachable("the network is gone")

    with sim_session(tmp_path, fault=cut) as runner:
        with pytest.raises(HostUnreachable):
            await runner.run()
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.STOPPED, 3)
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0


async def test_after_a_reboot_known_good_is_started_and_the_log_says_why(tmp_path: Path) -> None:
    def die(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            raise RuntimeError("the power went")

    with sim_session(tmp_path, fault=die) as runner, pytest.raises(RuntimeError):
        await runner.run()
    change_world(tmp_path, boot="another-boot", server=None, marker=None, runs={})
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
        told = [d for d in runner.store.decisions(runner.session_id) if d["what"] == "the host was rebooted"]
        assert len(told) == 1
        assert "brings known-good up again" in told[0]["reason"]
        assert_consistent(runner)


async def test_an_original_that_comes_back_by_itself_is_known_again(tmp_path: Path) -> None:
    def die(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            raise RuntimeError("the power went")

    with sim_session(tmp_path, fault=die) as runner:
        original = json.loads((tmp_path / "world" / "world.json").read_text())["server"]
        with pytest.raises(RuntimeError):
            await runner.run()
    change_world(tmp_path, boot="another-boot", server={**original, "pid": 7}, marker=None, runs={})
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
        (told,) = [d for d in runner.store.decisions(runner.session_id) if d["what"] == "the host was rebooted"]
        assert "came back by itself as process 7" in told["reason"]
        again = [t for t in runner.store.trials(runner.session_id) if t.experiment_id == RESTORE and t.adopted]
        assert [t.process.pid for t in again if t.process] == [7]


# --- defects of our own ---------------------------------------------------------------------------------------------


async def test_an_unexpected_error_leaves_known_good_to_the_host_and_the_session_resumable(tmp_path: Path) -> None:
    def break_down(name: str) -> None:
        if name.endswith("T2:ready"):
            raise ZeroDivisionError("a defect")

    with sim_session(tmp_path, flag("--threads", "8"), fault=break_down) as runner:
        with pytest.raises(ZeroDivisionError):
            await runner.run()
        row = runner.store.session(runner.session_id)
        assert (row.status, row.exit_code) == (SessionStatus.STOPPED, 1)
        assert "ZeroDivisionError: a defect" in row.reason
        assert await serves(runner, Role.KNOWN_GOOD)
        assert [words[0] for words in world_log(tmp_path)][-1:] == ["watcher"]
    with sim_session(tmp_path, flag("--threads", "8")) as runner:
        assert await runner.run() == 0
        assert [d["what"] for d in runner.store.decisions(runner.session_id) if "watcher" in d["what"]]
        assert_consistent(runner)
