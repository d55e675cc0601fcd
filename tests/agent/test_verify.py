"""A session computed again is the same however it ended, and whatever somebody changed in it is found and named."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.evidence import BASELINE, CLOSE_OUT
from agent.inbox import ask_to_stop
from agent.progress import Silent
from agent.session import Runner, new_session_id, open_session
from agent.validity import AFTERWARDS, QUIET
from agent.verify import Audit, Check, Kind, Result, verify
from state.models import DecisionKind, MeasurementStatus, Outcome, Verdict, digest
from state.store import Store
from tests.agent.sessions import FASTER, disturbed, finished, late, noise, traffic
from tests.agent.sim import ONE_POINT, SCENARIO, Listed, flag, sim_session
from tests.agent.test_loop import Killed


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("improved"))


@pytest.fixture
def own(database: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copy2(database, tmp_path / "state.db"))


def audit_of(path: Path) -> Audit:
    with Store.read(path) as store:
        return verify(store, store.latest_session().id)


def found(audit: Audit) -> list[str]:
    """Whatever was not the same, as one line each."""
    return [
        f"{check.kind} {check.subject}: {check.result} {check.why} {'; '.join(map(str, check.differences))}"
        for check in audit.checks
        if check.result is not Result.SAME
    ]


def of(audit: Audit, kind: Kind) -> list[Check]:
    return [check for check in audit.checks if check.kind is kind]


def assert_clean(path: Path) -> Audit:
    audit = audit_of(path)
    assert found(audit) == []
    assert audit.clean
    return audit


def verdicts(path: Path) -> dict[str, Verdict]:
    with Store.read(path) as store:
        return store.verdicts(store.latest_session().id)


# --- the same ---


def test_a_whole_session_with_its_close_out_is_the_same(database: Path) -> None:
    audit = assert_clean(database)
    known = verdicts(database)
    assert {check.subject for check in of(audit, Kind.VERDICT)} == set(known)
    assert CLOSE_OUT in known and len({verdict.outcome for verdict in known.values()}) >= 5
    with Store.read(database) as store:
        runs = [m.id for m in store.measurements(store.latest_session().id) if m.status is MeasurementStatus.VALID]
    assert [check.subject for check in of(audit, Kind.RUN)] == runs
    assert len(of(audit, Kind.DECISION)) == len(known)
    assert audit.summary.endswith(f"{len(known)} verdicts, {len(known)} decisions: all the same")


def test_nothing_is_written(own: Path) -> None:
    before = own.read_bytes()
    assert_clean(own)
    assert own.read_bytes() == before


@pytest.mark.anyio
async def test_a_session_under_way_is_checked_as_far_as_it_came(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(name: str) -> None:
        if name.startswith("wrote:") and runner.store.verdicts(runner.session_id):
            seen.append(audit_of(tmp_path / "state.db").summary)

    with sim_session(tmp_path, FASTER, config=ONE_POINT, fault=look) as runner:
        assert await runner.run() == 0
    assert len(seen) > 20
    assert all(summary.endswith("all the same") for summary in seen)


@pytest.mark.anyio
async def test_it_is_the_same_after_kills_and_resumes(tmp_path: Path) -> None:
    lives = 0
    while True:
        left = 23

        def die(name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed(name)

        lives += 1
        try:
            with sim_session(tmp_path, FASTER, flag("--cache", "q8_0"), config=ONE_POINT, fault=die) as runner:
                assert await runner.run() == 0
            break
        except Killed:
            assert_clean(tmp_path / "state.db")
    assert lives > 3
    assert_clean(tmp_path / "state.db")


@pytest.mark.anyio
async def test_it_is_the_same_after_a_stop_in_the_middle_of_a_run(tmp_path: Path) -> None:
    def ask(name: str) -> None:
        if name.endswith("M9/run:after-outcome"):
            ask_to_stop(tmp_path / "state.db", runner.session_id)

    with sim_session(tmp_path, fault=ask) as runner:
        assert await runner.run() == 4
    audit = assert_clean(tmp_path / "state.db")
    (lost,) = [check for check in of(audit, Kind.RUN) if check.subject == "M9"]
    assert lost.trusted == ("stopped on request",)
    with sim_session(tmp_path) as runner:
        assert await runner.run() == 0
    assert_clean(tmp_path / "state.db")


def reasons(path: Path, run: str) -> tuple[str, ...]:
    with Store.read(path) as store:
        return next(m.reasons for m in store.measurements(store.latest_session().id) if m.id == run)


def test_a_void_run_is_void_again_by_its_own_figures(tmp_path: Path) -> None:
    path = disturbed(tmp_path, "M6/run:after-outcome", "M6:collected", noise)
    assert reasons(path, "M6")[0].startswith(QUIET)
    (run,) = [check for check in of(assert_clean(path), Kind.RUN) if check.subject == "M6"]
    assert run.trusted == ()


def test_what_was_seen_beside_a_run_is_taken_on_trust(tmp_path: Path) -> None:
    path = disturbed(tmp_path, "M6/run:after-outcome", "M6:collected", traffic)
    (reason,) = reasons(path, "M6")
    assert reason.endswith(AFTERWARDS)
    trusting = {check.subject: check.trusted for check in of(assert_clean(path), Kind.RUN) if check.trusted}
    assert trusting == {"M6": (reason,)}


def test_a_session_that_gave_up_on_a_noisy_host_is_the_same(tmp_path: Path) -> None:
    path = finished(tmp_path, scenario=SCENARIO.model_copy(update={"foreign_cores": 1.0}))
    assert verdicts(path)[BASELINE].outcome is Outcome.INVALID
    assert_clean(path)


def test_a_verdict_for_want_of_time_is_the_same(tmp_path: Path) -> None:
    path = disturbed(tmp_path, "M6:collected", "end:closed", late)
    assert "the time budget of 28800 s is used up" in verdicts(path)[FASTER.id].reason
    assert_clean(path)


@pytest.mark.anyio
async def test_each_session_of_a_database_is_checked_by_itself(tmp_path: Path) -> None:
    with sim_session(tmp_path, FASTER, config=ONE_POINT) as first:
        assert await first.run() == 0
        session = new_session_id(first.store.clock())
        open_session(first.store, session, ONE_POINT, await first.target.adopt())
        second = Runner(first.store, session, first.target, ONE_POINT, Listed(flag("--poll", "0")), Silent())
        assert await second.run() == 0
        audits = [verify(first.store, row.id) for row in first.store.sessions()]
    assert [found(audit) for audit in audits] == [[], []]
    assert {check.subject for check in of(audits[1], Kind.VERDICT)} == {BASELINE, "poll-0"}


# --- what somebody changed ---


EVENTS = ("DROP TRIGGER events_are_never_changed", "DROP TRIGGER events_are_never_deleted")


def spoil(path: Path, *statements: str) -> None:
    """What somebody with sqlite3 can do."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0, statement


def event(kind: str, where: str, value: str, of: str) -> str:
    """SQL that changes one value in the body of the events of a kind."""
    return f"UPDATE events SET body = json_set(body, '$.{where}', {value}) WHERE kind = '{kind}' AND {of}"


M8 = "json_extract(body, '$.measurement.id') = 'M8'"
THREADS = "json_extract(body, '$.verdict.experiment_id') = 'threads-2'"
KEEP = "json_extract(body, '$.decision.kind') = 'keep'"
FIRST = "seq = 1"

CHANGED = [
    pytest.param(
        ["UPDATE measurements SET body = json_set(body, '$.metrics.output_tok_s', 1.5) WHERE id = 'M8'"],
        ["table measurements: different  measurements.M8.body.metrics.output_tok_s: stored 1.5, recomputed "],
        id="a metric in its table",
    ),
    pytest.param(
        [*EVENTS, event("measurement-closed", "measurement.metrics.output_tok_s", "1.5", M8)],
        ["run M8: different  metrics.output_tok_s: stored 1.5, recomputed ", "table measurements: different "],
        id="a metric in the log",
    ),
    pytest.param(
        [*EVENTS, event("measurement-closed", "raw.output_tok_s", "1.5", M8)],
        ["run M8: different  metrics.output_tok_s: stored ", "verdict "],
        id="a raw result in the log",
    ),
    pytest.param(
        [*EVENTS, event("measurement-closed", "measurement.status", "'invalid'", M8)],
        ["run M8: different  status: stored invalid, recomputed valid"],
        id="the status of a run",
    ),
    pytest.param(
        ["UPDATE verdicts SET outcome = 'better' WHERE experiment_id = 'threads-8'"],
        ["table verdicts: different  verdicts.threads-8.outcome: stored better, recomputed collapsed"],
        id="an outcome in its table",
    ),
    pytest.param(
        [*EVENTS, event("verdict-reached", "verdict.outcome", "'worse'", THREADS)],
        ["verdict threads-2: different  outcome: stored worse, recomputed better", "decision D"],
        id="an outcome in the log",
    ),
    pytest.param(
        [*EVENTS, event("verdict-reached", "verdict.objective.low", "0.5", THREADS)],
        ["verdict threads-2: different  objective.low: stored 0.5, recomputed 0."],
        id="an interval in the log",
    ),
    pytest.param(
        ["UPDATE decisions SET kind = 'revert' WHERE kind = 'keep' AND subject = 'threads-2'"],
        ["table decisions: different  decisions.D"],
        id="a decision in its table",
    ),
    pytest.param(
        [*EVENTS, event("decision-made", "decision.kind", "'revert'", KEEP)],
        ["kind: stored revert, recomputed keep", "table decisions: different "],
        id="a decision in the log",
    ),
    pytest.param(
        [
            "INSERT INTO events (session_id, at, kind, body) SELECT session_id, at, kind, body FROM events "
            "WHERE kind = 'decision-made' AND json_extract(body, '$.decision.kind') = 'baseline'",
            *EVENTS,
            "UPDATE events SET body = json_set(body, '$.decision.id', 'D99') WHERE seq = (SELECT max(seq) FROM events)",
        ],
        ["decision D99: different  baseline: stored baseline, recomputed no verdict asks for it"],
        id="a decision that nothing asked for",
    ),
    pytest.param(
        [
            "INSERT INTO events (session_id, at, kind, body) SELECT session_id, at + 1, 'role-set', "
            """'{"kind": "role-set", "role": "known-good", "fingerprint": "f", "reason": "mine"}' FROM events """
            "ORDER BY seq DESC LIMIT 1"
        ],
        ["decision role known-good: different  role known-good: stored f, recomputed "],
        id="another known-good",
    ),
    pytest.param(
        [*EVENTS, "DELETE FROM events WHERE kind = 'finding-made' AND seq > 50 AND seq < 120"],
        ["event log all events: different  event "],
        id="missing events",
    ),
    pytest.param(
        [*EVENTS, event("session-opened", "config.judge.minimal_effect", "0.5", FIRST)],
        ["event log all events: different  config_revision: stored "],
        id="the configuration",
    ),
    pytest.param(
        ["UPDATE specs SET body = json_set(body, '$.cwd', '/elsewhere')"],
        [".body.cwd: stored /elsewhere, recomputed /"],
        id="a command line in its table",
    ),
    pytest.param(
        [*EVENTS, event("spec-seen", "spec.cwd", "'/elsewhere'", "seq > 1")],
        ["event log configuration "],
        id="a command line in the log",
    ),
    pytest.param(
        ["DELETE FROM trials WHERE id = 'T2'"], ["trials.T2: stored absent, recomputed {"], id="a launch in its table"
    ),
    pytest.param(
        ["UPDATE effects SET outcome = '{}' WHERE key LIKE '%M8/run'"], ["table effects: different "], id="an effect"
    ),
    pytest.param(["UPDATE sessions SET exit_code = 3"], ["exit_code: stored 3, recomputed 0"], id="the exit code"),
]


@pytest.mark.parametrize(("statements", "named"), CHANGED)
def test_what_was_changed_is_found_and_named(statements: list[str], named: list[str], own: Path) -> None:
    spoil(own, *statements)
    audit = audit_of(own)
    said = found(audit)
    assert not audit.clean
    assert not audit.summary.endswith("all the same")
    assert [name for name in named if not any(name in line for line in said)] == [], said


REFINES = ONE_POINT.model_copy(update={"planner": ONE_POINT.planner.model_copy(update={"refine": True})})
ADDED = "json_extract(body, '$.experiment.id') = 'refine-1'"


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A night that begins with what promises most at once, where one idea names a flag that the server lacks."""
    ideas = (flag("--threads", "2"), flag("--parallel", "4"), flag("--unknown", "1", expected_gain=0.3))
    with sim_session(tmp_path_factory.mktemp("refined"), *ideas, config=REFINES) as runner:
        assert asyncio.run(runner.run()) == 0
        return runner.store.path


def test_what_was_refined_is_refined_again_from_the_log_alone(refined: Path) -> None:
    with Store.read(refined) as store:
        session = store.latest_session().id
        made = [one["id"] for one in store.decisions(session) if one["kind"] == DecisionKind.REFINE.value]
        first = next(todo.experiment for todo in store.todos(session) if todo.id == "refine-1")
    assert {str(change) for change in first.changes} == {"--threads 2", "--parallel 4"}
    trusting = [check.subject for check in of(assert_clean(refined), Kind.DECISION) if check.trusted]
    assert len(made) > 1
    assert made[0] in trusting


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            event("todo-added", "experiment.changes", "json('[]')", ADDED),
            "todo-added.experiment.changes: stored [], recomputed [{",
        ),
        (
            event("todo-added", "experiment.priority", "0.25", ADDED),
            "todo-added.experiment.priority: stored 0.25, recomputed 1.0",
        ),
        (
            event("decision-made", "decision.what", "'nothing'", "json_extract(body, '$.decision.kind') = 'refine'"),
            "decision-made.decision.what: stored nothing, recomputed 1 more on the list",
        ),
        (
            "INSERT INTO events (session_id, at, kind, body) SELECT session_id, at, kind, "
            f"json_set(body, '$.experiment.id', 'refine-99') FROM events WHERE kind = 'todo-added' AND {ADDED}",
            "refine-99: stored on the list, recomputed no decision asks for it",
        ),
    ],
)
def test_another_refinement_than_follows_from_the_log_is_found(
    refined: Path, tmp_path: Path, changed: str, named: str
) -> None:
    path = Path(shutil.copy2(refined, tmp_path / "state.db"))
    spoil(path, *EVENTS, changed)
    said = found(audit_of(path))
    assert any(line.startswith("decision ") and named in line for line in said), said


def test_a_change_is_named_where_it_was_made_and_nowhere_else(own: Path) -> None:
    """The verdict rests on the raw results, so figures that were changed beside them do not spread."""
    spoil(own, *EVENTS, event("measurement-closed", "measurement.metrics.output_tok_s", "1.5", M8))
    spoil(own, "UPDATE measurements SET body = json_set(body, '$.metrics.output_tok_s', 1.5) WHERE id = 'M8'")
    assert [line.split(":")[0] for line in found(audit_of(own))] == ["run M8"]


def test_a_log_without_its_beginning_is_named(own: Path) -> None:
    spoil(own, *EVENTS, "DELETE FROM events WHERE seq = 1")
    (line,) = found(audit_of(own))
    assert "event 1: stored absent" in line
    assert "first event of the session: stored spec-seen, recomputed session-opened" in line


def test_a_log_that_cannot_have_been_written_like_this_is_named(own: Path) -> None:
    opened = "kind = 'measurement-opened' AND json_extract(body, '$.measurement.id') = 'M8'"
    spoil(own, *EVENTS, f"DELETE FROM events WHERE {opened}")
    first, *_, last = found(audit_of(own))
    assert first.startswith("event log all events: different  event ")
    assert "(measurement-closed) cannot follow the events before it" in last


def test_a_verdict_on_a_launch_that_is_gone_is_named(own: Path) -> None:
    spoil(own, *EVENTS, "DELETE FROM events WHERE json_extract(body, '$.trial.id') = 'T1'")
    said = found(audit_of(own))
    assert any(
        line.startswith("verdict ") and "what it rests on: stored absent, recomputed T1" in line for line in said
    )


# --- what cannot be told again ---


def rewrite(path: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let the events of a kind be as another version would have written them."""
    spoil(path, *EVENTS)
    with closing(sqlite3.connect(path)) as connection, connection:
        for seq, text in connection.execute("SELECT seq, body FROM events WHERE kind = ?", [kind]).fetchall():
            body = json.loads(text)
            change(body)
            connection.execute("UPDATE events SET body = ? WHERE seq = ?", [json.dumps(body), seq])


def unverified(audit: Audit, kind: Kind) -> set[str]:
    return {check.why for check in of(audit, kind) if check.result is Result.UNVERIFIABLE}


def test_verdicts_of_another_version_that_differ_prove_nothing(own: Path) -> None:
    rewrite(own, "agent-attached", lambda body: body.update(version="0.0.9"))
    assert_clean(own)
    rewrite_outcome = event("verdict-reached", "verdict.objective.low", "0.5", THREADS)
    spoil(own, rewrite_outcome)
    audit = audit_of(own)
    (why,) = unverified(audit, Kind.VERDICT)
    assert why.startswith("version 0.0.9 wrote it, this is ")
    assert not audit.clean


@pytest.mark.parametrize("rule", [{"alpha": 0.05}, {"judge": 1}], ids=["other numbers", "another revision"])
def test_verdicts_of_a_judge_that_is_gone_prove_nothing(own: Path, rule: dict[str, float]) -> None:
    rewrite(own, "verdict-reached", lambda body: body["verdict"]["rule"].update(rule))
    assert unverified(audit_of(own), Kind.VERDICT) == {"a judge with other rules wrote it"}


def test_results_of_another_client_and_results_that_were_not_stored(own: Path) -> None:
    def forget(body: dict[str, Any]) -> None:
        body["raw"] = None if body["measurement"]["id"] == "M8" else {"tokens": 5}

    rewrite(own, "measurement-closed", forget)
    audit = audit_of(own)
    whys = {check.subject: check.why for check in of(audit, Kind.RUN)}
    assert whys["M8"] == "the client's own result was not stored"
    assert whys["M9"] == "the client's result cannot be used: 'run_id'"
    assert {check.result for check in of(audit, Kind.VERDICT)} == {Result.SAME}


def test_a_configuration_that_this_version_cannot_read(own: Path) -> None:
    def older(body: dict[str, Any]) -> None:
        body["config"]["judge"]["alpha"] = 0.05
        body["config_revision"] = digest(body["config"])

    rewrite(own, "session-opened", older)
    audit = audit_of(own)
    for kind in (Kind.RUN, Kind.VERDICT):
        (why,) = unverified(audit, kind)
        assert why.startswith("its configuration is that of another version (judge.alpha: ")
