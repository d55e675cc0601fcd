"""A whole unattended night with its four ends: a keep, a revert, a flag that is refused, a start that fails.

A subclass gives the fixture `night`, lived through on a real server that nobody holds. What is tried has effects that
no busy machine hides: several times faster, several times slower, or no start at all.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from agent.verify import Result, verify
from state.models import DecisionKind, Outcome, Role, SessionStatus, TodoStatus, TrialStatus
from tests.e2e.rig import CANARY, Agent, Rig, assert_at_most_one_server
from tests.e2e.test_real_session import database, spec_words, words_of

NIGHT_S = 3600
"""After which it hangs."""

KEPT, REFUSED, FAILED, REVERTED = "wider", "invented", "too-much", "narrow"
IDEA = """
[[experiments]]
id = "{id}"
title = "{title}"
hypothesis = "{hypothesis}"
changes = [{changes}]
priority = {priority}
expected_gain = {expected_gain}
"""
UNTOLD = {DecisionKind.CHOOSE, DecisionKind.HEAL}
"""Decisions that stand beside the story."""


def idea(name: str, title: str, hypothesis: str, changes: str, priority: float, expected_gain: float = 0.1) -> str:
    """An experiment for the session file; those of higher priority are tried first."""
    return IDEA.format(
        id=name, title=title, hypothesis=hypothesis, changes=changes, priority=priority, expected_gain=expected_gain
    )


INVENTED = idea(
    REFUSED,
    "A flag that the server does not have",
    "it is refused before anything is stopped",
    '{ kind = "flag", name = "--no-such-flag", value = "1" }',
    0.8,
)


class Night(NamedTuple):
    """What was seen from outside."""

    host: Rig
    original: list[str]
    agent: Agent
    argv: list[str]
    environ: dict[str, str]
    generates: bool
    workers: dict[int, int]
    listener: int | None
    restored: list[str]
    failed_with: str
    """Words of the cause that must be found for the start that fails."""
    kept_words: tuple[str, ...]
    """Part of the command line that must serve at the end."""


def lived_through(host: Rig, session: Path, failed_with: str, kept_words: tuple[str, ...]) -> Night:
    """Nobody looks until it has ended; then a person asks for the original."""
    original = host.argv()
    agent = host.agent("start", str(session), *database(host))
    agent.wait(NIGHT_S)
    argv, environ, workers, listener = host.argv(), host.environ(), host.workers(), host.listener()
    generates = host.generates()
    host.agent("restore", "--original", *database(host)).wait(NIGHT_S)
    return Night(
        host, original, agent, argv, environ, generates, workers, listener, host.argv(), failed_with, kept_words
    )


class UnattendedNight:
    def test_it_goes_to_its_end_by_itself(self, night: Night) -> None:
        assert night.agent.process.returncode == 0, night.agent.said
        with night.host.store() as store:
            assert store.latest_session().status is SessionStatus.DONE
            kinds = Counter(decision["kind"] for decision in store.decisions(store.latest_session().id))
        assert kinds[DecisionKind.END] == 1
        assert not {DecisionKind.INTERRUPTED, DecisionKind.RESUME, DecisionKind.VOID} & set(kinds)

    def test_the_log_tells_all_four_ends_in_order(self, night: Night) -> None:
        with night.host.store() as store:
            decisions = store.decisions(store.latest_session().id)
        told = [(one["kind"], one["subject"]) for one in decisions if one["kind"] not in UNTOLD]
        assert told[2:-2] == [
            (DecisionKind.BASELINE, "baseline"),
            (DecisionKind.KEEP, KEPT),
            (DecisionKind.BLOCK, REFUSED),
            (DecisionKind.BLOCK, FAILED),
            (DecisionKind.REVERT, REVERTED),
            (DecisionKind.CLOSE_OUT, "close-out"),
            (DecisionKind.KEEP, "close-out"),
        ]
        assert [kind for kind, _ in (*told[:2], *told[-2:])] == [
            DecisionKind.START,
            DecisionKind.PLAN,
            DecisionKind.END,
            DecisionKind.RESTORE,
        ]

    def test_the_kept_configuration_serves_and_generates(self, night: Night) -> None:
        with night.host.store() as store:
            assert words_of(night.argv) == spec_words(store, Role.FINAL)
            assert store.role(store.latest_session().id, Role.ORIGINAL) != store.role(
                store.latest_session().id, Role.FINAL
            )
        text = " ".join(night.argv)
        assert all(words in text for words in night.kept_words), text
        assert night.generates

    def test_an_invented_flag_is_refused_before_anything_is_stopped(self, night: Night) -> None:
        with night.host.store() as store:
            session = store.latest_session().id
            todos = {todo.id: todo for todo in store.todos(session)}
            assert not [trial for trial in store.trials(session) if trial.experiment_id == REFUSED]
            assert not store.measurements(session, REFUSED)
        assert todos[REFUSED].status is TodoStatus.BLOCKED
        assert "--no-such-flag" in todos[REFUSED].reason

    def test_a_failed_start_is_explained_blocked_and_mended(self, night: Night) -> None:
        with night.host.store() as store:
            session = store.latest_session().id
            trials, todos = store.trials(session), {todo.id: todo for todo in store.todos(session)}
            kept = store.comparison(session, KEPT).candidate
        (failed,) = [trial for trial in trials if trial.experiment_id == FAILED and trial.failure is not None]
        assert failed.failure is not None
        assert night.failed_with in failed.failure.cause
        assert failed.failure.rule
        assert failed.failure.cause in todos[FAILED].reason
        assert todos[FAILED].status is TodoStatus.BLOCKED
        after = trials[trials.index(failed) + 1]
        assert (after.status, after.fingerprint) == (TrialStatus.READY, kept)

    def test_what_was_slower_is_taken_back(self, night: Night) -> None:
        with night.host.store() as store:
            session = store.latest_session().id
            verdict = store.verdicts(session)[REVERTED]
            tried = [trial for trial in store.trials(session) if trial.experiment_id == REVERTED]
        assert tried and all(trial.failure is None for trial in tried)
        assert verdict.outcome is Outcome.COLLAPSED or (
            verdict.objective is not None and verdict.objective.estimate < 0
        )

    def test_every_verdict_is_computed_again_alike(self, night: Night) -> None:
        with night.host.store() as store:
            audit = verify(store, store.latest_session().id)
        assert [check for check in audit.checks if check.result is not Result.SAME] == []

    def test_two_servers_never_live_at_once_and_no_worker_is_left(self, night: Night) -> None:
        assert_at_most_one_server(night.host)
        assert night.listener in night.workers
        assert len(set(night.workers.values())) == 1, "workers of another launch are left"

    def test_nothing_is_launched_or_run_twice(self, night: Night) -> None:
        launches = Counter(start.launch for start in night.host.starts())
        assert set(launches.values()) <= {1}
        assert set(Counter(night.host.runs()).values()) == {1}
        with night.host.store() as store:
            session = store.latest_session().id
            launched = {f"{session}-{trial.id}" for trial in store.trials(session) if not trial.adopted}
        assert not launches or set(launches) == launched | {"operator"}

    def test_secrets_come_back_with_each_launch_and_are_told_nowhere(self, night: Night) -> None:
        assert night.environ["SECRET_CANARY"] == f"{CANARY}-env"
        assert night.argv[night.argv.index("--api-key") + 1] == f"{CANARY}-key"
        stored = [path for path in night.host.database.parent.rglob("*") if path.is_file()]
        told = [path for agent in night.host.agents for path in (agent.out, agent.err)]
        assert night.host.database in stored
        assert [path.name for path in (*stored, *told) if CANARY.encode() in path.read_bytes()] == []

    def test_the_original_comes_back_when_a_person_asks(self, night: Night) -> None:
        assert night.restored == night.original
