"""A person's word to a session: atomic files beside the database; the session alone writes the database."""

from __future__ import annotations

import glob
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from state.errors import StoreUnwritable
from state.words import WORD, Word


class Letter(NamedTuple):
    """One word in the inbox; None where the file holds none that can be read."""

    file: Path
    word: Word | None


def stop_file(database: Path, session_id: str) -> Path:
    """The file whose presence asks the session to stop."""
    return _inbox(database) / f"stop-{session_id}"


def ask_to_stop(database: Path, session_id: str) -> None:
    """Leave a stop request for a running session. Raises StoreUnwritable."""
    do = "send SIGTERM to the session's process (see `status`), which means the same"
    _leave(stop_file(database, session_id), f"asked by process {os.getpid()}\n", "the request to stop", do)


def new_word_id() -> str:
    """An id that no other word has."""
    return f"W{secrets.token_hex(4)}"


def leave_word(database: Path, session_id: str, word: Word) -> Path:
    """Leave a word for a session, behind those that wait already; its file. Raises StoreUnwritable."""
    file = _inbox(database) / f"word-{session_id}-{int(word.at * 1e6):020d}-{word.id}.json"
    _leave(file, word.model_dump_json(), "the word", "free some space, or ask whoever owns the folder")
    return file


def letters(database: Path, session_id: str) -> list[Letter]:
    """The words that wait for a session, in the order in which they were said."""
    found = sorted(_inbox(database).glob(f"word-{glob.escape(session_id)}-*.json"))
    return [letter for letter in map(_read, found) if letter is not None]


def waiting(database: Path, session_id: str) -> list[Word]:
    """Those of them that can be read."""
    return [letter.word for letter in letters(database, session_id) if letter.word is not None]


def put_away(letter: Letter) -> None:
    """Take a letter out of the inbox; what could not be read stays beside it under another name.

    A file that cannot be removed does no harm: its word has been heard, and is known by its id.
    """
    with suppress(OSError):
        if letter.word is None:
            letter.file.rename(letter.file.with_name(f"unreadable-{letter.file.name}"))
        else:
            letter.file.unlink(missing_ok=True)


def readdress(database: Path, old: str, new: str) -> None:
    """Words that wait for one session wait for another from now on."""
    for letter in letters(database, old):
        with suppress(OSError):
            letter.file.rename(letter.file.with_name(letter.file.name.replace(old, new, 1)))


def _inbox(database: Path) -> Path:
    return database.parent / "inbox"


def _read(file: Path) -> Letter | None:
    """One letter; None for a file that is gone by now."""
    try:
        return Letter(file, WORD.validate_json(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        return Letter(file, None)


def _leave(file: Path, text: str, what: str, do: str) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as written:
            written.write(text)
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreUnwritable(f"{what} could not be left: {error.strerror}", where={"file": file}, do=do) from error
