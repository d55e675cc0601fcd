"""What a store that alone writes remembers of its sessions; it asks nothing and only forgets what events touched."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from state import events as ev
from state.models import LaunchSpec
from state.rows import Rows, touched
from state.tables import SessionRow

Attended = tuple[float | None, tuple[tuple[float, float], ...]]


class Kept:
    """Rows by session and table with the ids to be read again, specs, sessions, and what was computed of them.

    `attended`: a session's first moment, and the times in which nothing of it was going on; `happened`: events by kind.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Rows[Any]] = {}
        self.stale: dict[tuple[str, str], set[str]] = {}
        self.derived: dict[tuple[str, Hashable], tuple[tuple[Any, ...], tuple[object, ...], Any]] = {}
        self.folded: dict[tuple[str, Hashable], tuple[int, Any]] = {}
        self.specs: dict[str, LaunchSpec] = {}
        self.sessions: dict[str, SessionRow] = {}
        self.attended: dict[str, Attended] = {}
        self.happened: dict[tuple[str, str], list[Any]] = {}

    def note(self, session_id: str, event: ev.Event) -> None:
        """An event was committed: what it touched has to be read again."""
        for table, row_id in touched(session_id, event):
            if table == "sessions":
                self.sessions.pop(session_id, None)
            elif (session_id, table) in self.rows:
                self.stale.setdefault((session_id, table), set()).add(row_id)
        if isinstance(event, ev.AgentAttached | ev.WindowAwaited):
            self.attended.pop(session_id, None)
        self.happened.pop((session_id, event.kind), None)
