"""From the bytes of an answer to what a language model said, or to a named fault; pure, and it repairs nothing.

An answer that was cut off can look complete once it is mended, and mean something else. So the endpoint's reason for
ending is looked at before anything is read, and whatever is not exactly what was asked for is a fault.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError

from state.exchanges import Reply, Silence
from state.models import Frozen

PROPOSALS = 6
LOOK_UPS = 3
CHANGES = 4


class Misfit(StrEnum):
    """What is wrong with an answer that did come."""

    TRUNCATED = "truncated"
    REFUSED = "refused to answer"
    UNFINISHED = "ended for another reason"
    EMPTY = "empty"
    FENCED = "inside a code fence"
    PROSE = "prose"
    EXTRA_TEXT = "text beside the JSON"
    BROKEN = "broken JSON"
    WRONG_SCHEMA = "not the JSON that was asked for"


class Fault(Frozen):
    """Why an answer is of no use."""

    kind: Silence | Misfit
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


class Said(Frozen):
    """A whole answer; its items are looked at one by one, so that a bad one does not take the others with it."""

    look_ups: tuple[Any, ...] = ()
    experiments: tuple[Any, ...] = ()
    reason: str = Field(default="", max_length=20_000)


# --- from bytes to a reply ---------------------------------------------------------------------------------


def read_body(body: bytes) -> Reply:
    """A chat completion as it came over the wire."""
    try:
        told = _loads(body.decode("utf-8", "replace"))
    except ValueError:
        whole = not body.lstrip().startswith(b"{")
        return Reply(silence=Silence.NO_COMPLETION if whole and body.strip() else Silence.CUT, detail=_start(body))
    choice = _first(told.get("choices")) if isinstance(told, dict) else None
    message = choice.get("message") if choice is not None else None
    if choice is None or not isinstance(message, dict):
        return Reply(silence=Silence.NO_COMPLETION, detail=_start(body))
    counted = told.get("usage")
    usage: dict[str, Any] = counted if isinstance(counted, dict) else {}
    return Reply(
        text=_text(message.get("content")),
        finish=_text(choice.get("finish_reason")),
        refusal=_text(message.get("refusal")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def _first(choices: object) -> dict[str, Any] | None:
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(value: object) -> str:
    """Text that can be stored: half a surrogate pair has no UTF-8."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None


def _start(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split())


# --- from a reply to what was said -------------------------------------------------------------------------


def read_answer(reply: Reply) -> Said | Fault:
    """What was said, if the answer is whole and nothing but the JSON that was asked for."""
    if reply.silence is not None:
        return Fault(kind=reply.silence, detail=reply.detail)
    if reply.finish == "length":
        return Fault(kind=Misfit.TRUNCATED, detail="the answer reached its ceiling of tokens")
    if reply.refusal or reply.finish == "content_filter":
        return Fault(kind=Misfit.REFUSED, detail=tidy(reply.refusal, 200))
    if reply.finish != "stop":
        return Fault(kind=Misfit.UNFINISHED, detail=tidy(reply.finish, 40) or "no reason given")
    text = reply.text.strip()
    if not text:
        return Fault(kind=Misfit.EMPTY)
    if text.startswith("```"):
        return Fault(kind=Misfit.FENCED)
    if not text.startswith("{"):
        return Fault(kind=Misfit.EXTRA_TEXT if "{" in text else Misfit.PROSE)
    return _read(text)


def _read(text: str) -> Said | Fault:
    try:
        told = _loads(text)
    except json.JSONDecodeError as error:
        extra = error.msg == "Extra data"
        return Fault(kind=Misfit.EXTRA_TEXT if extra else Misfit.BROKEN, detail=f"{error.msg} at {error.pos}")
    except ValueError as error:
        return Fault(kind=Misfit.BROKEN, detail=str(error))
    try:
        return Said.model_validate(told)
    except ValidationError as error:
        return Fault(kind=Misfit.WRONG_SCHEMA, detail=complaint(error))


def _loads(text: str) -> Any:
    """JSON that means one thing only; ValueError for keys that stand twice, NaN, and nesting without end."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return told


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def complaint(error: ValidationError) -> str:
    """What does not fit, in one line; values are left out, since they may be of any size."""
    said = [f"{'.'.join(map(str, detail['loc'])) or 'the whole'}: {detail['msg']}" for detail in error.errors()]
    return tidy("; ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else ""), 300)


def tidy(text: str, limit: int) -> str:
    """A model's words in one line of harmless characters, cut to a length: they end up in terminals and in Markdown."""
    plain = "".join(character if character.isprintable() else " " for character in text[: 4 * limit])
    line = " ".join(plain.split()).translate(_HARMLESS)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


_HARMLESS = str.maketrans({"|": "/", "<": "‹", ">": "›"})
