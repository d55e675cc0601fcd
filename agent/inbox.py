"""A person's word to a running session: atomic files beside the database; the session alone writes the database."""

from __future__ import annotations

import os
from pathlib import Path


def stop_file(database: Path, session_id: str) -> Path:
    """The file whose presence asks the session to stop."""
    return database.parent / "inbox" / f"stop-{session_id}"


def ask_to_stop(database: Path, session_id: str) -> None:
    """Leave a stop request for a running session."""
    request = stop_file(database, session_id)
    request.parent.mkdir(parents=True, exist_ok=True)
    temporary = request.with_name(f".{request.name}.{os.getpid()}")
    temporary.write_text(f"asked by process {os.getpid()}\n")
    temporary.replace(request)
