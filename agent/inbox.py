"""A person's word to a running session: atomic files beside the database; the session alone writes the database."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from state.errors import StoreUnwritable


def stop_file(database: Path, session_id: str) -> Path:
    """The file whose presence asks the session to stop."""
    return database.parent / "inbox" / f"stop-{session_id}"


def ask_to_stop(database: Path, session_id: str) -> None:
    """Leave a stop request for a running session. Raises StoreUnwritable."""
    request = stop_file(database, session_id)
    temporary = request.with_name(f".{request.name}.{os.getpid()}")
    try:
        request.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"asked by process {os.getpid()}\n")
        temporary.replace(request)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreUnwritable(
            f"the request to stop could not be left: {error.strerror}",
            where={"file": request},
            do="send SIGTERM to the session's process (see `status`), which means the same",
        ) from error
