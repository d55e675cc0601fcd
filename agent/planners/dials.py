"""Which values of a flag or variable a schema may offer, from the server's help and what is known of it; pure.

It narrows what a model can say, never what is accepted: the screen judges whatever is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from state.models import Frozen, LaunchSpec
from tools.servers.base import KnownFlag

ROOM = 4
"""A number without bounds may become so many times the largest value that is known for it."""
UNKNOWN = 4.0
"""Stands for that value where none is known."""
FRACTIONS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.95")
TEXT = {"type": "string", "pattern": "^[A-Za-z0-9_.,:=+/-]{1,60}$"}
SWITCH: Mapping[str, Any] = {"type": "null"}
Kind = Literal["flag", "env"]


class Hint(Frozen):
    """What is known of a flag or variable beside the help: values that were thought of, and a sensible span."""

    values: tuple[str, ...] = ()
    span: tuple[float, float] | None = None
    tried: tuple[str | None, ...] = Field(default=(), description="values that it was given alone already")


class Dial(Frozen):
    """One flag or variable with the JSON schema of what it may be set to; without one, any short text."""

    kind: Kind = "flag"
    name: str
    action: Literal["set", "remove"] = "set"
    value: Mapping[str, Any] | None = Field(default=None)


def dials(
    flags: Iterable[KnownFlag], variables: Iterable[str], spec: LaunchSpec, hints: Mapping[str, Hint]
) -> tuple[Dial, ...]:
    """One for each flag and variable that can become something else than it is; the few variables come first."""
    turned = [_variable(name, spec, hints.get(name, Hint())) for name in variables]
    turned += [_flag(flag, spec, hints.get(flag.name, Hint())) for flag in flags]
    return tuple(dial for dial in turned if dial is not None)


def _flag(flag: KnownFlag, spec: LaunchSpec, hint: Hint) -> Dial | None:
    now = spec.flags.get(flag.name)
    if not flag.takes_value:
        dial = Dial(name=flag.name, action="set" if now is None else "remove", value=SWITCH)
        return None if None in hint.tried else dial
    current = () if now is None else (" ".join(now),)
    past = (*current, *hint.tried)
    if flag.type == "choice":
        return _listed("flag", flag.name, flag.choices or (), past)
    if flag.count != 1 or flag.type in ("str", "json"):
        return _listed("flag", flag.name, hint.values, past) or Dial(name=flag.name)
    known = (*current, *([] if flag.default is None else [flag.default]), *hint.values)
    numbers = [number for text in known if (number := _number(text)) is not None]
    if flag.type == "float":
        return _listed("flag", flag.name, _floats(flag, numbers), past)
    bounds = _bounds(flag, hint, numbers)
    words = [word for word in flag.choices or () if word not in past]
    return Dial(name=flag.name, value=_either(bounds, words))


def _variable(name: str, spec: LaunchSpec, hint: Hint) -> Dial | None:
    current = (spec.env[name],) if name in spec.env else ()
    if not hint.values:
        return Dial(kind="env", name=name)
    return _listed("env", name, hint.values, (*current, *hint.tried))


def _listed(kind: Kind, name: str, values: Sequence[str], past: Collection[str | None]) -> Dial | None:
    """One of several words; None when all of them are set or were tried already."""
    left = [value for value in dict.fromkeys(values) if value not in past]
    return Dial(kind=kind, name=name, value={"type": "string", "enum": left}) if left else None


def _bounds(flag: KnownFlag, hint: Hint, numbers: Sequence[float]) -> dict[str, Any]:
    """The help's own bounds, else the catalogue's, else room above what is known."""
    low, high = hint.span or (None, None)
    low = flag.low if flag.low is not None else low
    high = flag.high if flag.high is not None else high
    least = low if low is not None else min([1.0, *(number for number in numbers if number == 0)])
    most = high if high is not None else ROOM * max([number for number in numbers if number > 0], default=UNKNOWN)
    return {"type": "integer", "minimum": int(least), "maximum": int(max(least, most))}


def _floats(flag: KnownFlag, numbers: Sequence[float]) -> list[str]:
    """A grammar cannot bound a fraction, so a few stand for all."""
    most = max([*(n for n in (flag.high,) if n is not None), *numbers], default=1.0)
    if most <= 1.0:
        return [text for text in FRACTIONS if (flag.low or 0.0) <= float(text) <= (flag.high or 1.0)]
    return [f"{most * share:g}" for share in (0.25, 0.5, 1.0)]


def _either(number: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    return {"anyOf": [number, {"type": "string", "enum": list(words)}]} if words else number


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
