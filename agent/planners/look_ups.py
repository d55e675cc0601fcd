"""What a language model may look up, a few texts at a time: a wish is read here, and what is found is quoted; pure.

Each wish is a kind and a name. The name of a flag or an experiment is only ever a key. The text that is searched for in
source files is literal, the files are named by a plain pattern, and neither is ever a path or part of a command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from agent.planners.answer import complaint, tidy
from state.models import Frozen

LINES = 40
LINE = 300
BYTES = 6000
"""Of one answer to all look-ups of a turn."""
LONGEST_TEXT = 80
SERVER = "server"
"""Whose log is meant where no experiment is named: of the newest launch, which may be loading."""


class LookUp(Frozen):
    """One wish; `files` belongs to a search in source files alone."""

    kind: Literal["help", "log", "telemetry", "source"]
    of: str = Field(min_length=1, max_length=100)
    files: str = Field(default="", pattern=r"^[A-Za-z0-9_.*?-]{0,60}$")

    @field_validator("of")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("expected one line of printable text")
        return value

    def __str__(self) -> str:
        named = f"{self.kind} of {tidy(self.of, 60)}"
        return f"{named} in {self.files or '*'}" if self.kind == "source" else named


class Shelf(Frozen):
    """What the session has itself: help texts by flag, causes of failures and readings by experiment."""

    help: dict[str, str] = Field(default_factory=dict)
    log: dict[str, str] = Field(default_factory=dict)
    telemetry: dict[str, str] = Field(default_factory=dict)


def wish_of(item: Any) -> LookUp | str:
    """What is wished for, or why that cannot be understood."""
    try:
        wish = LookUp.model_validate(item)
    except ValidationError as error:
        return f"A look-up was not understood: {complaint(error)}"
    if wish.kind == "source" and (len(wish.of) > LONGEST_TEXT or not wish.of.strip()):
        return f"A look-up was not understood: a text to be searched for has 1 to {LONGEST_TEXT} characters"
    return wish


def from_shelf(wish: LookUp, shelf: Shelf) -> str:
    """The answer to a wish for what the session has; empty when it has none of it."""
    place: Mapping[str, str] = {"help": shelf.help, "log": shelf.log, "telemetry": shelf.telemetry}.get(wish.kind, {})
    return place.get(wish.of, "")


def told(wish: LookUp, text: str, first: bool = False) -> str:
    """What was found, each line of it quoted: the last lines, or the `first` ones."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return f"{wish}: there is none."
    return f"{wish}:\n" + "\n".join(quoted(lines[:LINES] if first else lines[-LINES:]))


def together(parts: Sequence[str]) -> str:
    """All answers of a turn; what is too much is left out, and said to be."""
    text = "\n\n".join(parts)
    return text if len(text.encode()) <= BYTES else text.encode()[:BYTES].decode("utf-8", "ignore") + '…"\n(cut here)'


def quoted(lines: Iterable[str]) -> list[str]:
    """Lines of somebody else's text, each as one JSON string: no line can end its own quotation."""
    return [json.dumps(line[:LINE], ensure_ascii=False) for line in lines]
