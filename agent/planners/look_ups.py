"""What a language model may look up: texts that this session has already, a few at a time; pure, it reads nothing anew.

Each look-up is a kind and a name. A name is only ever a key here: it is no path, no pattern and no part of a command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from agent.planners.answer import LOOK_UPS, complaint, tidy
from state.models import Frozen

LINES = 40
LINE = 300
BYTES = 6000
"""Of one answer to all look-ups of a turn."""


class LookUp(Frozen):
    """One wish."""

    kind: Literal["help", "log", "telemetry"]
    of: str = Field(min_length=1, max_length=100)


class Shelf(Frozen):
    """All that can be looked up: help texts by flag, ends of logs and readings by experiment."""

    help: dict[str, str] = Field(default_factory=dict)
    log: dict[str, str] = Field(default_factory=dict)
    telemetry: dict[str, str] = Field(default_factory=dict)


def looked_up(wishes: Sequence[Any], shelf: Shelf) -> str:
    """The answers, each line of them quoted; what is too much is left out, and said to be."""
    parts = [_one(wish, shelf) for wish in wishes[:LOOK_UPS]]
    if len(wishes) > LOOK_UPS:
        parts.append(f"{len(wishes) - LOOK_UPS} more were not looked up.")
    text = "\n\n".join(parts)
    return text if len(text.encode()) <= BYTES else text.encode()[:BYTES].decode("utf-8", "ignore") + '…"\n(cut here)'


def _one(wish: Any, shelf: Shelf) -> str:
    try:
        asked = LookUp.model_validate(wish)
    except ValidationError as error:
        return f"A look-up was not understood: {complaint(error)}"
    place: Mapping[str, str] = getattr(shelf, asked.kind)
    name = tidy(asked.of, 60)
    if asked.of not in place:
        return f"{asked.kind} of {name}: there is none."
    return f"{asked.kind} of {name}:\n" + "\n".join(quoted(place[asked.of].splitlines()[-LINES:]))


def quoted(lines: Iterable[str]) -> list[str]:
    """Lines of somebody else's text, each as one JSON string: no line can end its own quotation."""
    return [json.dumps(line[:LINE], ensure_ascii=False) for line in lines]
