"""What is told of a session: the report, the headline, the summary and the decision log, on real databases."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.evidence import CLOSE_OUT
from agent.report import command, headline, markdown
from agent.status import summary
from state import events as ev
from state.models import LaunchSpec, MeasurementStatus, Outcome, Role, SessionStatus, TodoStatus, Verdict
from state.replay import decision_log
from state.store import Store
from tests.agent.sessions import finished, moved
from tests.agent.sim import SCENARIO, flag


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("improved"))


@pytest.fixture
def store(database: Path) -> Iterator[Store]:
    with Store.read(database) as opened:
        yield opened


@pytest.fixture
def session(store: Store) -> str:
    return store.latest_session().id


# --- the report ---


def test_the_report_begins_with_the_fresh_final_comparison(store: Store, session: str) -> None:
    text = markdown(store, session)
    final = store.verdicts(session)[CLOSE_OUT].objective
    assert final is not None
    assert text.splitlines()[:3] == ["# Tuning report: sim", "", f"**{headline(store, session)}**"]
    assert final.percent in text.splitlines()[2]


def test_the_report_shows_what_changed_and_both_commands(store: Store, session: str) -> None:
    lines = markdown(store, session).splitlines()
    assert "- `flags.--threads: 2 ≠ 1` (now ≠ before)" in lines
    shell = lines[lines.index("```sh") + 1 : lines.index("```")]
    final, original = (store.role(session, role) for role in (Role.FINAL, Role.ORIGINAL))
    assert final is not None and original is not None
    assert shell == ["# now", command(store.spec(final)), "# original", command(store.spec(original))]


def test_every_experiment_finding_and_failed_launch_is_in_the_report(store: Store, session: str) -> None:
    text = markdown(store, session)
    verdicts = store.verdicts(session)
    for todo in store.todos(session):
        outcome = verdicts[todo.id].outcome if todo.id in verdicts else todo.status
        assert f"| {todo.experiment.title} | {outcome} |" in text
    for finding in store.findings(session):
        assert f"- **{finding.id}** {finding.statement}." in text
    for trial in store.trials(session):
        if trial.failure is not None:
            assert f"- {trial.id} for {trial.experiment_id}: {trial.failure.failure_class}" in text


def test_the_report_counts_what_was_measured(store: Store, session: str) -> None:
    text = markdown(store, session)
    valid = [m for m in store.measurements(session) if m.status is MeasurementStatus.VALID]
    launches = [trial for trial in store.trials(session) if not trial.adopted]
    assert f"- {len(valid)} valid benchmark runs, 0 that do not count" in text
    assert f"{len(launches)} launches, {sum(trial.down_s for trial in launches):.0f} s in all" in text
    assert "at most 5%" in text


def test_an_unchanged_server_needs_no_way_back(tmp_path: Path) -> None:
    with Store.read(finished(tmp_path, flag("--threads", "64"))) as store:
        session = store.latest_session().id
        assert "The original configuration serves, unchanged." in markdown(store, session)
        assert headline(store, session) == "Nothing better was found; the original configuration serves."


def test_a_session_that_has_only_begun_can_be_reported(tmp_path: Path) -> None:
    with moved(tmp_path, SessionStatus.RUNNING, "") as (store, session):
        text = markdown(store, session)
        assert "not ended" in text
        assert "None yet." in text


def test_a_command_line_survives_a_shell() -> None:
    argv = ("/opt/my server/bin", "--api-prefix", "it's")
    spec = LaunchSpec(
        engine="e", program=("/opt/my server/bin",), flags={}, argv=argv, cwd="/srv/a b", user="u", env={"A": "1 2"}
    )
    assert shlex.split(command(spec)) == ["cd", "/srv/a b", "&&", "A=1 2", *argv]


# --- the headline, for every way to end ---


def closed(outcome: Outcome) -> ev.Event:
    return ev.VerdictReached(verdict=Verdict(experiment_id=CLOSE_OUT, outcome=outcome, reason="r"))


@pytest.mark.parametrize(
    ("status", "reason", "before", "said"),
    [
        pytest.param(
            SessionStatus.DONE, "worked off", (closed(Outcome.INCONCLUSIVE),), "did not confirm", id="unconfirmed"
        ),
        pytest.param(SessionStatus.DONE, "worked off", (), "Nothing better was found", id="nothing found"),
        pytest.param(
            SessionStatus.DONE, "too noisy to judge: x", (), "Nothing was changed: too noisy to judge: x.", id="noisy"
        ),
        pytest.param(SessionStatus.RUNNING, "", (), "Session running: under way.", id="running"),
        pytest.param(SessionStatus.STOPPED, "Ctrl-C", (), "Session stopped: Ctrl-C.", id="stopped"),
        pytest.param(SessionStatus.REFUSED, "changed\n  pid: 7", (), "Session refused: changed.", id="refused"),
        pytest.param(
            SessionStatus.NEEDS_HUMAN, "dead\n  command: x", (), "Session needs human: dead.", id="needs human"
        ),
    ],
)
def test_every_end_has_a_headline_of_one_line(
    tmp_path: Path, status: SessionStatus, reason: str, before: tuple[ev.Event, ...], said: str
) -> None:
    with moved(tmp_path, status, reason, *before) as (store, session):
        line = headline(store, session)
        assert said in line
        assert "\n" not in line
        assert summary(store, session)["headline"] == line
        assert summary(store, session)["next_step"]


def test_all_that_a_person_needs_stands_in_the_report_and_in_status(tmp_path: Path) -> None:
    reason = "known-good does not start\n  command: sim-server --threads 1\n  what you can do: start it by hand"
    with moved(tmp_path, SessionStatus.NEEDS_HUMAN, reason) as (store, session):
        assert f"```text\n{reason}\n```" in markdown(store, session)
        assert summary(store, session)["reason"] == reason


def test_a_noisy_host_is_told_as_such(tmp_path: Path) -> None:
    noisy = SCENARIO.model_copy(update={"foreign_cores": 1.0})
    with Store.read(finished(tmp_path, scenario=noisy)) as store:
        line = headline(store, store.latest_session().id)
        assert line.startswith("Nothing was changed: too noisy to judge")


# --- status and the decision log ---


def test_the_summary_of_a_finished_session(store: Store, session: str) -> None:
    found = summary(store, session)
    assert json.loads(json.dumps(found)) == found
    assert (found["session"], found["target"], found["status"], found["exit_code"]) == (session, "sim", "done", 0)
    assert (found["experiment"], found["measuring"]) == (None, None)
    assert found["restarts"] == len([trial for trial in store.trials(session) if not trial.adopted])
    changed = [todo for todo in store.todos(session) if todo.experiment.changes]
    tried = [todo for todo in changed if todo.status in (TodoStatus.DONE, TodoStatus.BLOCKED)]
    assert found["experiments_judged"] == len(tried)
    assert [todo["id"] for todo in found["todos"]] == [todo.id for todo in store.todos(session)]
    assert 0 <= found["active_s"] <= found["budget_s"]


def test_the_decision_log_tells_each_run_and_launch_that_it_rests_on(store: Store, session: str) -> None:
    log = decision_log(store, session)
    says = {item["id"]: item["says"] for entry in log for item in entry["evidence"]}
    for taken in store.measurements(session):
        if taken.id in says:
            assert f"{taken.arm} at {taken.load_point}, launch {taken.trial_id}" in says[taken.id]
            assert taken.metrics is not None
            assert f"{taken.metrics.output_tok_s:.1f} output tok/s" in says[taken.id]
    assert says["T1"].startswith("the adopted process runs ")
    assert [entry["kind"] for entry in log][:3] == ["start", "plan", "choose"]
    assert log[-1]["kind"] == "end"
