"""Stored events played again, one by one, into an empty store in memory; it must not touch the store they come from.

So a question can be asked as of then: between two events the scratch store is what the real one was, with its clock.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType

from sqlite_utils import Database
from sqlite_utils.db import NotFoundError

from state import events as ev
from state.database import damaged
from state.kept import Kept
from state.migrations import migrations
from state.projection import project
from state.store import Store, StoredEvent


class Scratch:
    """A store in memory that grows event by event; a context manager. `path` is only named in errors."""

    def __init__(self, path: Path) -> None:
        self._now = 0.0
        db = Database(memory=True)
        migrations.apply(db)
        self._kept = Kept()
        self.store = Store(db, path, lambda: self._now, kept=self._kept)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.db.close()

    def stand_at(self, at: float) -> None:
        """Set the clock (Unix seconds) to just before something happened then."""
        self._now = at

    def put(self, stored: StoredEvent, instead: ev.Event | None = None) -> None:
        """Let an event happen at its own time and place in the log, or another one `instead` of it.

        Raises StoreDamaged for an event that cannot follow those before it: some are missing, or one is there twice.
        """
        self.stand_at(stored.at)
        event = instead or stored.event
        row = {"seq": stored.seq, "session_id": stored.session_id, "at": stored.at, "kind": event.kind}
        try:
            self.store.db.table("events").insert({**row, "body": event.model_dump_json()})
            project(self.store.db, stored.session_id, stored.at, event)
            self._kept.note(stored.session_id, event)
        except (sqlite3.IntegrityError, NotFoundError) as error:
            what = f"event {stored.seq} ({event.kind}) cannot follow the events before it: {error}"
            raise damaged(self.store.path, what) from error
