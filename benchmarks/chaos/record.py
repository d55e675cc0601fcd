"""What a session's database says, read with plain sqlite3 and nothing of Ratchet's; it must not write or judge."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Record:
    """A snapshot of the latest session in a state.db."""

    def __init__(self, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as database:
            database.row_factory = sqlite3.Row

            def rows(query: str, *values: object) -> list[Row]:
                return [dict(row) for row in database.execute(query, values)]

            database.execute("BEGIN")  # one moment for all tables
            sessions = rows("SELECT * FROM sessions ORDER BY started_at DESC LIMIT 1")
            self.session: Row | None = sessions[0] if sessions else None
            self.id: str = self.session["id"] if self.session is not None else ""
            self.events = rows("SELECT seq, session_id, at, kind, body FROM events ORDER BY seq")
            self.specs = {row["fingerprint"]: json.loads(row["body"]) for row in rows("SELECT * FROM specs")}
            roles, self.todos, self.effects, self.trials, self.measurements, self.decisions = (
                rows(f"SELECT * FROM {table} WHERE session_id = ? ORDER BY rowid", self.id)
                for table in ("roles", "todos", "effects", "trials", "measurements", "decisions")
            )
            self.roles = {row["role"]: row["fingerprint"] for row in roles}
            self.intact: str = database.execute("PRAGMA integrity_check").fetchone()[0]

    @property
    def ended(self) -> bool:
        """Whether nothing is left to resume."""
        return self.session is not None and self.session["status"] in ("done", "failed")

    def argv(self, role: str) -> list[str]:
        """The command line of the spec in a role."""
        return list(self.specs[self.roles[role]]["argv"])

    def phase(self) -> str:
        """What the session was about, in a few words."""
        if self.session is None:
            return "before a session was opened"
        for taken in self.measurements:
            if taken["status"] == "open":
                return f"run {taken['id']} of {taken['experiment_id']}"
        for trial in self.trials:
            if trial["status"] == "open":
                return f"launch {trial['id']} for {trial['experiment_id']}"
        last = self.decisions[-1] if self.decisions else {"id": "", "kind": "nothing", "subject": ""}
        return f"after {last['kind']} {last['id']} of {last['subject']}"


def read(path: Path) -> Record | None:
    """The record, None while there is no database, or one that cannot be read just now."""
    if not path.exists():
        return None
    with contextlib.suppress(sqlite3.Error):
        return Record(path)
    return None
