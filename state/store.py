"""One state.db: the only door to sqlite_utils for reading and writing a session; it must not decide anything.

Every write is one event plus its projections in one transaction. There is one writer at a time, held by an
advisory lock on a file beside the database; readers open it read-only and never wait for the writer.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter
from sqlite_utils import Database

from state import events as ev
from state.database import (
    PATIENCE_S,
    WriterLock,
    connect,
    create,
    damaged,
    migrate,
    prove_writable,
    refuse_foreign,
    refuse_missing_events,
    story,
    writer_lock,
)
from state.errors import ConfigError
from state.exchanges import Ask, Exchange, Reply
from state.models import (
    Adoption,
    Answer,
    Decision,
    Experiment,
    Finding,
    Frozen,
    LaunchSpec,
    Measurement,
    Role,
    SessionStatus,
    Todo,
    TodoStatus,
    Trial,
    Verdict,
)
from state.projection import project
from state.words import Word

Record = TypeVar("Record", bound=Frozen)
Happened = TypeVar("Happened", ev.Noted, ev.WordHeard, ev.CarriedOver)
Parsed = TypeVar("Parsed")


class SessionRow(Frozen):
    """Where one session stands, as the sessions table has it."""

    id: str
    target: str
    status: SessionStatus
    reason: str
    exit_code: int | None
    started_at: float
    ended_at: float | None
    epoch: int
    config: dict[str, Any]
    config_revision: str
    workload_revision: str
    adoption: Adoption
    agent_pid: int | None
    attached: int


class ComparisonRow(Frozen):
    """Which specs an open experiment compares, by fingerprint."""

    experiment: Experiment
    parent: str
    candidate: str
    epoch: int


class StoredEvent(NamedTuple):
    """One event as it was written: its place in the log, its session and its time (Unix seconds)."""

    seq: int
    session_id: str
    at: float
    event: ev.Event


class EffectRow(Frozen):
    """An effect: open as long as `outcome` is None."""

    key: str
    intent: dict[str, Any]
    outcome: dict[str, Any] | None


def steady_clock() -> Callable[[], float]:
    """Unix time that no change of the machine's clock can move: wall time of now, then the monotonic clock's steps.

    Budgets and durations are differences of these times, so a jump by an hour must neither spend nor give back an hour.
    """
    ahead = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead


class Store:
    """A handle on one state.db. Use `Store.write(path)` or `Store.read(path)`; both are context managers."""

    def __init__(self, db: Database, path: Path, clock: Callable[[], float], lock: WriterLock | None = None) -> None:
        self.db = db
        self.path = path
        self.clock = clock
        self.lock = lock

    # --- opening -------------------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def write(
        cls, path: Path, clock: Callable[[], float] | None = None, patience_s: float = PATIENCE_S
    ) -> Iterator[Store]:
        """Open for writing, creating and migrating as needed. Raises TargetLocked, StoreError.

        `patience_s` is how long each write waits for a program that has locked the database.
        """
        with story(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with writer_lock(path) as lock:
            with story(path):
                if path.exists():
                    refuse_foreign(path, patience_s)
                else:
                    create(path)
                    lock.begin_anew()
                db = connect(path, "rw", patience_s)
            try:
                with story(path):
                    refuse_missing_events(db, path, lock.last_event)
                    migrate(db, path)
                    prove_writable(db, path)
                    db.execute("PRAGMA synchronous = FULL")
                    db.execute("PRAGMA foreign_keys = ON")
                yield cls(db, path, clock or steady_clock(), lock)
            finally:
                db.close()

    @classmethod
    @contextmanager
    def read(cls, path: Path, patience_s: float = PATIENCE_S) -> Iterator[Store]:
        """Open read-only. Raises ConfigError when there is no database, StoreError when it is not ours."""
        with story(path):
            if not path.exists():
                raise ConfigError(
                    f"there is no session database at {path}",
                    do="run `start` first, or name another database with --db or RATCHET_STATE",
                )
            refuse_foreign(path, patience_s)
            db = connect(path, "ro", patience_s)
        try:
            yield cls(db, path, time.time)
        finally:
            db.close()

    # --- writing -------------------------------------------------------------------------------------------

    def append(self, session_id: str, *happened: ev.Event) -> None:
        """Write events and their projections in one transaction: all of them are there afterwards, or none."""
        at = self.clock()
        last = 0
        with story(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                for event in happened:
                    row = {"session_id": session_id, "at": at, "kind": event.kind, "body": event.model_dump_json()}
                    written = self.db.execute(
                        "INSERT INTO events (session_id, at, kind, body) VALUES (:session_id, :at, :kind, :body)", row
                    )
                    last = written.lastrowid or 0
                    project(self.db, session_id, at, event)
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # the first error is the one to tell of
                    if self.db.conn.in_transaction:
                        self.db.execute("ROLLBACK")
                raise
        if self.lock is not None:
            self.lock.note(last)

    def next_id(self, table: str, prefix: str) -> str:
        """The next free id such as `T12`; safe because there is one writer and ids are never deleted."""
        count = self._rows(f"SELECT count(*) AS n FROM {table}")[0]["n"]
        return f"{prefix}{count + 1}"

    # --- reading -------------------------------------------------------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads in the block see one moment, whatever a running session writes meanwhile."""
        with story(self.path):
            self.db.execute("BEGIN")
        try:
            yield
        finally:
            self.db.execute("ROLLBACK")

    def events(self, session_id: str) -> list[StoredEvent]:
        """The session's events in order, with every session's `spec-seen`: configurations are shared by all."""
        rows = self._rows(
            "SELECT seq, session_id, at, body FROM events WHERE session_id = ? OR kind = 'spec-seen' ORDER BY seq",
            session_id,
        )
        return self._parsed(_event, rows)

    def rows(self, table: str, session_id: str) -> dict[str, dict[str, Any]]:
        """A session's rows of a table as they stand there, by key; `specs` belong to all sessions.

        None of a table that an older schema lacks.
        """
        with story(self.path):
            there = self.db.table(table).exists()
        if not there:
            return {}
        column = {"sessions": "id", "specs": "NULL"}.get(table, "session_id")
        rows = self._rows(f"SELECT * FROM {table} WHERE ifnull({column} = ?, true)", session_id)
        keys = [key for key in self.db.table(table).pks if key != "session_id"]
        return {" ".join(str(row[key]) for key in keys): row for row in rows}

    def notes(self, session_id: str, subject: str) -> list[str]:
        """What was noted of a subject, oldest first."""
        noted = self._of_kind(session_id, ev.Noted)
        return [event.text for event in noted if event.subject == subject]

    def words(self, session_id: str) -> list[Word]:
        """What persons said to the session and it has heard, in that order."""
        return [event.word for event in self._of_kind(session_id, ev.WordHeard)]

    def carried_over(self, session_id: str) -> ev.CarriedOver | None:
        """What the session took over from an earlier one, None when it began anew."""
        return next(iter(self._of_kind(session_id, ev.CarriedOver)), None)

    def missing_events(self) -> list[int]:
        """Numbers of events that were written once and are gone (the first of each gap); a whole log has none."""
        rows = self._rows(
            "SELECT seq, lag(seq, 1, 0) OVER (ORDER BY seq) AS before FROM"
            " (SELECT seq FROM events UNION ALL SELECT seq + 1 FROM sqlite_sequence WHERE name = 'events')"
        )
        return [row["before"] + 1 for row in rows if row["seq"] != row["before"] + 1]

    def sessions(self) -> list[SessionRow]:
        """All sessions, oldest first."""
        return self._parsed(_session, self._rows("SELECT * FROM sessions ORDER BY started_at, id"))

    def session(self, session_id: str) -> SessionRow:
        """One session. Raises ConfigError when there is none of that id."""
        rows = self._rows("SELECT * FROM sessions WHERE id = ?", session_id)
        if not rows:
            known = ", ".join(row.id for row in self.sessions()) or "none"
            raise ConfigError(f"there is no session {session_id} in {self.path}", do=f"sessions here: {known}")
        return self._parsed(_session, rows)[0]

    def latest_session(self) -> SessionRow:
        """The session begun last. Raises ConfigError when there is none."""
        found = self.sessions()
        if not found:
            raise ConfigError(f"{self.path} holds no session yet", do="run `start` first")
        return found[-1]

    def role(self, session_id: str, role: Role) -> str | None:
        """Fingerprint of the spec in that role, None before it is set."""
        rows = self._rows("SELECT fingerprint FROM roles WHERE session_id = ? AND role = ?", session_id, role.value)
        return str(rows[0]["fingerprint"]) if rows else None

    def spec(self, fingerprint: str) -> LaunchSpec:
        """A spec by fingerprint (KeyError when it was never seen)."""
        rows = self._rows("SELECT body FROM specs WHERE fingerprint = ?", fingerprint)
        if not rows:
            raise KeyError(fingerprint)
        return self._parsed(_body_of(LaunchSpec), rows)[0]

    def todos(self, session_id: str) -> list[Todo]:
        """The todo list in the order of its making."""
        rows = self._rows("SELECT * FROM todos WHERE session_id = ? ORDER BY position", session_id)
        return self._parsed(_todo, rows)

    def todo_history(self, session_id: str, todo_id: str) -> list[dict[str, Any]]:
        """Every change of mind about a todo, oldest first; none in a database of an older schema."""
        with story(self.path):
            there = "v_todo_history" in self.db.view_names()
        sql = "SELECT * FROM v_todo_history WHERE session_id = ? AND todo = ? ORDER BY seq"
        return self._rows(sql, session_id, todo_id) if there else []

    def open_comparison(self, session_id: str) -> ComparisonRow | None:
        """The experiment in progress, if any; there is never more than one."""
        rows = self._rows(
            "SELECT * FROM todos WHERE session_id = ? AND status = ?", session_id, TodoStatus.IN_PROGRESS.value
        )
        return self._parsed(_comparison, rows)[0] if rows else None

    def comparison(self, session_id: str, experiment_id: str) -> ComparisonRow:
        """What an experiment compared (KeyError when it was never begun)."""
        rows = self._rows(
            "SELECT * FROM todos WHERE session_id = ? AND id = ? AND parent IS NOT NULL", session_id, experiment_id
        )
        if not rows:
            raise KeyError(experiment_id)
        return self._parsed(_comparison, rows)[0]

    def trials(self, session_id: str) -> list[Trial]:
        """All launches, oldest first."""
        return self._bodies(Trial, "trials", session_id, "opened_at, CAST(substr(id, 2) AS INTEGER)")

    def measurements(self, session_id: str, experiment_id: str | None = None) -> list[Measurement]:
        """All benchmark runs, or those of one experiment, oldest first."""
        found = self._bodies(Measurement, "measurements", session_id, "CAST(substr(id, 2) AS INTEGER)")
        return [m for m in found if experiment_id is None or m.experiment_id == experiment_id]

    def answers(self, session_id: str, trials: Collection[str]) -> list[tuple[str, tuple[Answer, ...]]]:
        """What valid runs of some launches have as answers to the fixed prompts: (measurement, answers), in order."""
        rows = self._rows(
            "SELECT id, trial_id, answers FROM measurements WHERE session_id = ? AND answers IS NOT NULL"
            " AND status = 'valid' ORDER BY CAST(substr(id, 2) AS INTEGER)",
            session_id,
        )
        return self._parsed(_answers, [row for row in rows if row["trial_id"] in trials])

    def verdicts(self, session_id: str) -> dict[str, Verdict]:
        """Verdicts by experiment id."""
        found = self._bodies(Verdict, "verdicts", session_id, "at")
        return {verdict.experiment_id: verdict for verdict in found}

    def decisions(self, session_id: str) -> list[dict[str, Any]]:
        """All decisions in order, each with its time (`at`, Unix seconds)."""
        rows = self._rows(
            "SELECT * FROM decisions WHERE session_id = ? ORDER BY CAST(substr(id, 2) AS INTEGER)", session_id
        )
        return self._parsed(lambda row: {**row, "evidence": json.loads(row["evidence"])}, rows)

    def findings(self, session_id: str) -> list[Finding]:
        """All findings in order."""
        rows = self._rows("SELECT * FROM findings WHERE session_id = ? ORDER BY at, id", session_id)
        return self._parsed(_finding, rows)

    def exchanges(self, session_id: str) -> list[Exchange]:
        """What was said to a language model and what it answered, in order; none in a database of an older schema."""
        found = self.rows("exchanges", session_id).values()
        return self._parsed(_exchange, sorted(found, key=lambda row: int(row["id"][1:])))

    def effect(self, key: str) -> EffectRow | None:
        """An effect by key, None when it was never intended."""
        rows = self._rows("SELECT key, intent, outcome FROM effects WHERE key = ?", key)
        return self._parsed(_effect, rows)[0] if rows else None

    def opened_at(self, table: str, item_id: str) -> float:
        """When a trial or measurement was opened, Unix seconds."""
        return float(self._rows(f"SELECT opened_at FROM {table} WHERE id = ?", item_id)[0]["opened_at"])

    def active_s(self, session_id: str, until: float | None = None) -> float:
        """Seconds from the session's first event until `until` (now) in which an agent was attached.

        The pause before an `agent-attached` is time without an agent, except before the very first.
        """
        rows = self._rows(
            "SELECT min(at) AS first, max(at) AS last, (SELECT coalesce(sum(at - before), 0) FROM ("
            " SELECT at, kind, lag(at) OVER (ORDER BY seq) AS before FROM events WHERE session_id = :s)"
            " WHERE kind = 'agent-attached') AS away FROM events WHERE session_id = :s",
            s=session_id,
        )
        first, away = rows[0]["first"], rows[0]["away"]
        end = self.clock() if until is None else until
        return 0.0 if first is None else max(0.0, end - float(first) - float(away))

    def last_event_at(self, session_id: str) -> float:
        """When the session's last event was written, Unix seconds."""
        return float(self._rows("SELECT max(at) AS at FROM events WHERE session_id = ?", session_id)[0]["at"])

    def timeline(self, session_id: str) -> list[dict[str, Any]]:
        """The session's story, a row a step."""
        return self._rows("SELECT * FROM v_timeline WHERE session_id = ? ORDER BY seq", session_id)

    def decide(self, session_id: str, **fields: Any) -> Decision:
        """Build a Decision with the next free id (it is written with `append`, beside what it decides)."""
        return Decision(id=self.next_id("decisions", "D"), **fields)

    def _rows(self, sql: str, *parameters: object, **named: object) -> list[dict[str, Any]]:
        with story(self.path):
            return list(self.db.query(sql, named or list(parameters)))

    def _parsed(self, parse: Callable[[dict[str, Any]], Parsed], rows: list[dict[str, Any]]) -> list[Parsed]:
        """Rows as ours. Damage inside a page is not seen by SQLite, so text that is none of ours is damage too."""
        try:
            return [parse(row) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(self.path, f"a row cannot be read: {str(error).splitlines()[0]}") from error

    def _of_kind(self, session_id: str, kind: type[Happened]) -> list[Happened]:
        """The session's events of one kind, in order."""
        rows = self._rows(
            "SELECT seq, session_id, at, body FROM events WHERE session_id = ? AND kind = ? ORDER BY seq",
            session_id,
            kind.model_fields["kind"].default,
        )
        found = [stored.event for stored in self._parsed(_event, rows)]
        return [event for event in found if isinstance(event, kind)]

    def _bodies(self, model: type[Record], table: str, session_id: str, order: str) -> list[Record]:
        rows = self._rows(f"SELECT body FROM {table} WHERE session_id = ? ORDER BY {order}", session_id)
        return self._parsed(_body_of(model), rows)


def _answers(row: dict[str, Any]) -> tuple[str, tuple[Answer, ...]]:
    return row["id"], _ANSWERS.validate_json(row["answers"])


_ANSWERS: TypeAdapter[tuple[Answer, ...]] = TypeAdapter(tuple[Answer, ...])


def _body_of(model: type[Record]) -> Callable[[dict[str, Any]], Record]:
    return lambda row: model.model_validate_json(row["body"])


def _session(row: dict[str, Any]) -> SessionRow:
    return SessionRow.model_validate(
        {**row, "config": json.loads(row["config"]), "adoption": Adoption.model_validate_json(row["adoption"])}
    )


def _comparison(row: dict[str, Any]) -> ComparisonRow:
    return ComparisonRow(
        experiment=Experiment.model_validate_json(row["body"]),
        parent=row["parent"],
        candidate=row["candidate"],
        epoch=row["epoch"],
    )


def _todo(row: dict[str, Any]) -> Todo:
    return Todo(
        experiment=Experiment.model_validate_json(row["body"]),
        status=TodoStatus(row["status"]),
        priority=row["priority"],
        reason=row["reason"],
        identity=row["identity"],
    )


def _finding(row: dict[str, Any]) -> Finding:
    evidence = tuple(json.loads(row["evidence"]))
    return Finding(id=row["id"], statement=row["statement"], evidence=evidence, scope=row["scope"])


def _exchange(row: dict[str, Any]) -> Exchange:
    reply = None if row["reply"] is None else Reply.model_validate_json(row["reply"])
    return Exchange(ask=Ask.model_validate_json(row["ask"]), reply=reply)


def _event(row: dict[str, Any]) -> StoredEvent:
    return StoredEvent(row["seq"], row["session_id"], row["at"], ev.EVENT.validate_json(row["body"]))


def _effect(row: dict[str, Any]) -> EffectRow:
    outcome = None if row["outcome"] is None else json.loads(row["outcome"])
    return EffectRow(key=row["key"], intent=json.loads(row["intent"]), outcome=outcome)
