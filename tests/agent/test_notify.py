"""A message about an end: received by a real HTTP server; what goes wrong is told and changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.config import NotifySection
from agent.notify import tell
from state.models import SessionStatus
from tests.inbox import Messages, inbox


@pytest.fixture(name="inbox")
def _inbox() -> Iterator[tuple[str, Messages]]:
    with inbox() as found:
        yield found


def section(tmp_path: Path, text: str, when: str = "needed") -> NotifySection:
    path = tmp_path / "urls"
    path.write_text(text)
    return NotifySection.model_validate({"urls_file": path, "when": when})


def test_a_session_that_needs_a_person_says_so(tmp_path: Path, inbox: tuple[str, list[dict[str, str]]]) -> None:
    url, received = inbox
    wished = section(tmp_path, f"# the night shift\n\n{url}\n")
    assert tell(wished, SessionStatus.DONE, "t", "b") is None
    assert received == []
    assert tell(wished, SessionStatus.NEEDS_HUMAN, "Ratchet on box: needs human", "start it by hand") is None
    assert [(m["title"], m["message"]) for m in received] == [("Ratchet on box: needs human", "start it by hand")]


def test_every_end_is_told_when_that_is_wished(tmp_path: Path, inbox: tuple[str, list[dict[str, str]]]) -> None:
    url, received = inbox
    assert tell(section(tmp_path, url, "always"), SessionStatus.DONE, "t", "b") is None
    assert len(received) == 1


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "names no address"),
        ("nonsense\n", "does not understand line 1"),
        ("json://127.0.0.1:9/\n", "did not take the message"),
    ],
)
def test_what_cannot_be_sent_is_said(tmp_path: Path, text: str, phrase: str) -> None:
    told = tell(section(tmp_path, text), SessionStatus.REFUSED, "t", "b")
    assert told is not None and phrase in told


def test_a_missing_file_is_said_and_nobody_wished_is_no_trouble(tmp_path: Path) -> None:
    gone = NotifySection.model_validate({"urls_file": tmp_path / "gone"})
    assert "cannot be read" in (tell(gone, SessionStatus.REFUSED, "t", "b") or "")
    assert tell(NotifySection(), SessionStatus.NEEDS_HUMAN, "t", "b") is None
