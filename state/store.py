"""One state.db: the only door to sqlite_utils for reading and writing a session; it must not decide anything.

Every write is one event plus its projections in one transaction. There is one writer at a time, held by an
advisory lock on a file beside the database; readers open it read-only and never wait for the writer.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from state.exchanges import Exchange
from state.kept import Attended, Kept
from state.models import (
    Answer,
    Decision,
    Finding,
    LaunchSpec,
    Measurement,
    MeasurementStatus,
    Role,
    Todo,
    TodoStatus,
    Trial,
    Verdict,
)
from state.projection import project
from state.rows import Label, Rows
from state.tables import (
    ANSWERS,
    COMPLAINED,
    DECISIONS,
    EXPERIMENT,
    MEASUREMENTS,
    STATUS,
    TODOS,
    TRIAL,
    TRIALS,
    VERDICTS,
    Judged,
    Table,
    effect_row,
    exchange_row,
    finding_row,
    session_row,
)
from state.tables import ComparisonRow as ComparisonRow
from state.tables import EffectRow as EffectRow
from state.tables import SessionRow as SessionRow
from state.words import Word

Row = TypeVar("Row")
Happened = TypeVar("Happened", ev.Noted, ev.WordHeard, ev.CarriedOver, ev.ClockRead)
Parsed = TypeVar("Parsed")


class StoredEvent(NamedTuple):
    """One event as it was written: its place in the log, its session and its time (Unix seconds)."""

    seq: int
    session_id: str
    at: float
    event: ev.Event


def steady_clock() -> Callable[[], float]:
    """Unix time that no change of the machine's clock can move: wall time of now, then the monotonic clock's steps.

    Budgets and durations are differences of these times, so a jump by an hour must neither spend nor give back an hour.
    """
    ahead = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead


class Store:
    """A handle on one state.db. Use `Store.write(path)` or `Store.read(path)`; both are context managers.

    The one that alone writes (`kept`) does not read again what it knows; a reader asks the database each time.
    """

    def __init__(
        self,
        db: Database,
        path: Path,
        clock: Callable[[], float],
        lock: WriterLock | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.db = db
        self.path = path
        self.clock = clock
        self.lock = lock
        self.kept = kept

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
                yield cls(db, path, clock or steady_clock(), lock, Kept())
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
                if self.kept is not None:
                    self.kept = Kept()  # what of it is there now, the database has to tell
                with suppress(sqlite3.Error):  # the first error is the one to tell of
                    if self.db.conn.in_transaction:
                        self.db.execute("ROLLBACK")
                raise
        if self.kept is not None:
            for event in happened:
                self.kept.note(session_id, event)
        if self.lock is not None:
            self.lock.note(last)

    def next_id(self, table: str, prefix: str) -> str:
        """The next free id such as `T12`; safe because there is one writer and ids are never deleted."""
        count = self._rows(f"SELECT coalesce(max(rowid), 0) AS n FROM {table}")[0]["n"]
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
        return self._parsed(session_row, self._rows("SELECT * FROM sessions ORDER BY started_at, id"))

    def session(self, session_id: str) -> SessionRow:
        """One session. Raises ConfigError when there is none of that id."""
        if self.kept is not None and session_id in self.kept.sessions:
            return self.kept.sessions[session_id]
        rows = self._rows("SELECT * FROM sessions WHERE id = ?", session_id)
        if not rows:
            known = ", ".join(row.id for row in self.sessions()) or "none"
            raise ConfigError(f"there is no session {session_id} in {self.path}", do=f"sessions here: {known}")
        (found,) = self._parsed(session_row, rows)
        if self.kept is not None:
            self.kept.sessions[session_id] = found
        return found

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
        if self.kept is not None and fingerprint in self.kept.specs:
            return self.kept.specs[fingerprint]
        rows = self._rows("SELECT body FROM specs WHERE fingerprint = ?", fingerprint)
        if not rows:
            raise KeyError(fingerprint)
        (found,) = self._parsed(lambda row: LaunchSpec.model_validate_json(row["body"]), rows)
        if self.kept is not None:
            self.kept.specs[fingerprint] = found
        return found

    def todos(self, session_id: str, label: Label | None = None) -> list[Todo]:
        """The todo list, or those todos that a label of `state.tables` names, in the order of its making."""
        rows = self._table(session_id, TODOS)
        return [listed.todo for listed in (rows.items if label is None else rows.with_label(label))]

    def todo(self, session_id: str, todo_id: str) -> Todo | None:
        """One todo, None when the list has none of that id."""
        rows = self._table(session_id, TODOS)
        return rows.get(todo_id).todo if rows.count((EXPERIMENT, todo_id)) else None

    def count(self, session_id: str, table: Table[Any], *labels: Label) -> int:
        """How many rows of a table have one of some labels (of one name, so that no row has two of them)."""
        rows = self._table(session_id, table)
        return sum(map(rows.count, labels))

    def todo_history(self, session_id: str, todo_id: str) -> list[dict[str, Any]]:
        """Every change of mind about a todo, oldest first; none in a database of an older schema."""
        with story(self.path):
            there = "v_todo_history" in self.db.view_names()
        sql = "SELECT * FROM v_todo_history WHERE session_id = ? AND todo = ? ORDER BY seq"
        return self._rows(sql, session_id, todo_id) if there else []

    def open_comparison(self, session_id: str) -> ComparisonRow | None:
        """The experiment in progress, if any; there is never more than one."""
        found = self._table(session_id, TODOS).with_label((STATUS, TodoStatus.IN_PROGRESS))
        return found[0].comparison if found else None

    def comparison(self, session_id: str, experiment_id: str) -> ComparisonRow:
        """What an experiment compared (KeyError when it was never begun)."""
        found = self._table(session_id, TODOS).get(experiment_id).comparison
        if found is None:
            raise KeyError(experiment_id)
        return found

    def trials(self, session_id: str, label: Label | None = None) -> list[Trial]:
        """All launches, or those that a label of `state.tables` names, oldest first."""
        rows = self._table(session_id, TRIALS)
        return list(rows.items) if label is None else rows.with_label(label)

    def trial(self, session_id: str, trial_id: str) -> Trial:
        """One launch (KeyError when there is none of that id)."""
        return self._table(session_id, TRIALS).get(trial_id)

    def measurements(self, session_id: str, experiment_id: str | None = None) -> list[Measurement]:
        """All benchmark runs, or those of one experiment, oldest first."""
        rows = self._table(session_id, MEASUREMENTS)
        return list(rows.items) if experiment_id is None else rows.with_label((EXPERIMENT, experiment_id))

    def measured_on(self, session_id: str, trial_id: str) -> list[Measurement]:
        """The benchmark runs on one launch, oldest first."""
        return self._table(session_id, MEASUREMENTS).with_label((TRIAL, trial_id))

    def open_measurement(self, session_id: str) -> Measurement | None:
        """The benchmark run that was begun and not closed, if any."""
        found = self._table(session_id, MEASUREMENTS).with_label((STATUS, MeasurementStatus.OPEN))
        return found[0] if found else None

    def complaints(self, session_id: str) -> list[Measurement]:
        """The benchmark runs against which the server itself spoke, oldest first."""
        return self._table(session_id, MEASUREMENTS).with_label(COMPLAINED)

    def before(self, session_id: str, experiment_id: str | None) -> tuple[list[Trial], list[Measurement]]:
        """Launches and runs that came before the experiment's own first ones; all while it has none."""
        trials, taken = self._table(session_id, TRIALS), self._table(session_id, MEASUREMENTS)
        own = (EXPERIMENT, experiment_id)
        return trials.items[: trials.first_of(own)], taken.items[: taken.first_of(own)]

    def answers(self, session_id: str, trials: list[str]) -> list[tuple[str, tuple[Answer, ...]]]:
        """What valid runs of some launches have as answers to the fixed prompts: (measurement, answers), in order."""
        rows = self._table(session_id, ANSWERS)
        found = [answered for name in trials for answered in rows.with_label((TRIAL, name))]
        found.sort(key=lambda answered: int(answered.measurement[1:]))
        return [(answered.measurement, answered.answers) for answered in found]

    def verdicts(self, session_id: str) -> dict[str, Verdict]:
        """Verdicts by experiment id, in the order in which they were reached; it is the store's own, and grows."""
        return self.folded(session_id, "verdicts", VERDICTS, dict[str, Verdict], _reached)

    def decisions(self, session_id: str, subject: str | None = None) -> list[dict[str, Any]]:
        """All decisions in order, or those on one subject, each with its time (`at`, Unix seconds)."""
        rows = self._table(session_id, DECISIONS)
        return list(rows.items) if subject is None else rows.with_label((EXPERIMENT, subject))

    def folded(
        self,
        session_id: str,
        name: Hashable,
        table: Table[Row],
        begin: Callable[[], Parsed],
        take: Callable[[Parsed, Row], object],
    ) -> Parsed:
        """What becomes of `begin()` when it takes in a table's rows in their order, kept by its name.

        Of what is kept only rows written since are taken in, so one may come a second time, as it is then: it has to
        put its first place right.
        """
        rows = self._table(session_id, table)
        known = None if self.kept is None else self.kept.folded.get((session_id, name))
        writes, found = (0, begin()) if known is None else known
        for row in rows.since(writes):
            take(found, row)
        if self.kept is not None:
            self.kept.folded[session_id, name] = rows.written(), found
        return found

    def derived(
        self,
        session_id: str,
        name: Hashable,
        rests_on: tuple[Table[Any], ...],
        compute: Callable[[], Parsed],
        but: str | None = None,
        given: tuple[object, ...] = (),
    ) -> Parsed:
        """What `compute` makes of some tables, kept by its name until one of their rows is written.

        Rows of the experiment `but` are none of its ground. `given` is what else it is made of: the very same objects.
        """
        if self.kept is None:
            return compute()
        own = None if but is None else (EXPERIMENT, but)
        stamp = (but, *(self._table(session_id, table).written(own) for table in rests_on))
        known = self.kept.derived.get((session_id, name))
        if known is None or known[0] != stamp or not all(map(is_, known[1], given)):
            known = self.kept.derived[session_id, name] = (stamp, given, compute())
        found: Parsed = known[2]
        return found

    def findings(self, session_id: str) -> list[Finding]:
        """All findings in order."""
        rows = self._rows("SELECT * FROM findings WHERE session_id = ? ORDER BY at, id", session_id)
        return self._parsed(finding_row, rows)

    def exchanges(self, session_id: str) -> list[Exchange]:
        """What was said to a language model and what it answered, in order; none in a database of an older schema."""
        found = self.rows("exchanges", session_id).values()
        return self._parsed(exchange_row, sorted(found, key=lambda row: int(row["id"][1:])))

    def effect(self, key: str) -> EffectRow | None:
        """An effect by key, None when it was never intended."""
        rows = self._rows("SELECT key, intent, outcome FROM effects WHERE key = ?", key)
        return self._parsed(effect_row, rows)[0] if rows else None

    def opened_at(self, table: str, item_id: str) -> float:
        """When a trial or measurement was opened, Unix seconds."""
        return float(self._rows(f"SELECT opened_at FROM {table} WHERE id = ?", item_id)[0]["opened_at"])

    def active_s(self, session_id: str, until: float | None = None) -> float:
        """Seconds from the session's first event until `until` (now) in which an agent was attached and not waiting.

        The pause before an `agent-attached` is time without an agent, except before the very first.
        """
        first, away = self._attended(session_id)
        end = self.clock() if until is None else until
        gone = sum(back - begun for begun, back in away if back <= end)
        return 0.0 if first is None else max(0.0, end - first - gone)

    def away(self, session_id: str) -> tuple[tuple[float, float], ...]:
        """Times in which no agent was attached or the session only waited for its window, as (begin, end)."""
        return self._attended(session_id)[1]

    def _attended(self, session_id: str) -> Attended:
        """A session's first moment, None before it, and the times in which nothing of it was going on."""
        known = None if self.kept is None else self.kept.attended.get(session_id)
        if known is not None:
            return known
        first = self._rows("SELECT min(at) AS first FROM events WHERE session_id = ?", session_id)[0]["first"]
        rows = self._rows(
            "SELECT begun, at FROM (SELECT seq, at, kind, CASE kind WHEN 'window-awaited'"
            " THEN at - json_extract(body, '$.seconds') ELSE lag(at) OVER (ORDER BY seq) END AS begun"
            " FROM events WHERE session_id = ?) WHERE kind IN ('agent-attached', 'window-awaited')"
            " AND begun IS NOT NULL ORDER BY seq",
            session_id,
        )
        if first is None:
            return None, ()
        found = float(first), tuple((float(row["begun"]), float(row["at"])) for row in rows)
        if self.kept is not None:
            self.kept.attended[session_id] = found
        return found

    def clock_read(self, session_id: str, until: float | None = None) -> tuple[float, ev.ClockRead] | None:
        """The newest reading of the host's clock (until a time), and when it was made; None before the first."""
        reads = self._when(session_id, ev.ClockRead)
        return next((read for read in reversed(reads) if until is None or read[0] <= until), None)

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
        return [event for _, event in self._when(session_id, kind)]

    def _when(self, session_id: str, kind: type[Happened]) -> list[tuple[float, Happened]]:
        """The session's events of one kind with their times, in order."""
        name = kind.model_fields["kind"].default
        kept = None if self.kept is None else self.kept.happened.get((session_id, name))
        if kept is None:
            sql = "SELECT seq, session_id, at, body FROM events WHERE session_id = ? AND kind = ? ORDER BY seq"
            kept = self._parsed(_event, self._rows(sql, session_id, name))
            if self.kept is not None:
                self.kept.happened[session_id, name] = kept
        return [(stored.at, stored.event) for stored in kept if isinstance(stored.event, kind)]

    def _table(self, session_id: str, table: Table[Row]) -> Rows[Row]:
        """A session's rows of a table; of those that were kept, only what was written since is read."""
        if self.kept is None:
            return self._into(Rows(table.labels), table, session_id)
        rows = self.kept.rows.get((session_id, table.name))
        stale = self.kept.stale.get((session_id, table.name))
        if rows is None:
            rows = self._into(Rows(table.labels), table, session_id)
        elif stale:
            rows = self._into(rows, table, session_id, tuple(stale))
        if stale:
            stale.clear()
        self.kept.rows[session_id, table.name] = rows
        return rows

    def _into(
        self, rows: Rows[Row], table: Table[Row], session_id: str, only: tuple[str, ...] | None = None
    ) -> Rows[Row]:
        """Rows as they stand in the database now: all of the session, or only those of some ids."""
        named = "" if only is None else f" AND {table.key} IN ({', '.join('?' * len(only))})"
        found = self._rows(
            f"SELECT {table.columns} FROM {table.source} WHERE session_id = ? AND {table.where}{named}",
            session_id,
            *(only or ()),
        )
        parsed = self._parsed(lambda row: (row[table.key], table.order(row), table.parse(row)), found)
        for row_id, order, row in sorted(parsed, key=lambda one: one[1]):
            rows.put(row_id, order, row)
        return rows


def _reached(found: dict[str, Verdict], judged: Judged) -> None:
    """A verdict behind those before it; one that replaces an earlier one comes last as well."""
    found.pop(judged.verdict.experiment_id, None)
    found[judged.verdict.experiment_id] = judged.verdict


def _event(row: dict[str, Any]) -> StoredEvent:
    return StoredEvent(row["seq"], row["session_id"], row["at"], ev.EVENT.validate_json(row["body"]))
