"""What can be turned on a server, and where a configuration lies on that grid; it knows no measurement."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from state.models import Change, LaunchSpec, LoadPoint

CHANGES: TypeAdapter[tuple[Change, ...]] = TypeAdapter(tuple[Change, ...])
Setting = tuple[str, ...]
"""The value of every knob, in the space's order."""


@dataclass(frozen=True)
class Knob:
    """Something that can be turned: its values, the first as found, and the changes that bring each about."""

    name: str
    tags: tuple[str, ...]
    values: Mapping[str, tuple[Change, ...]]


class Space:
    """The knobs of one server and the load points at which it is measured."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.name = name
        self.engine = str(given.get("engine", "llamacpp"))
        self.cores = int(given.get("cores", 2))
        self.gpus = int(given.get("gpus", 0))
        self.base = _flags(str(given["base"]).split())
        self.knobs = tuple(_knob(one) for one in given["knobs"])
        self.points = tuple(LoadPoint.model_validate(point) for point in given["load_points"])

    @property
    def found(self) -> Setting:
        """What a session finds."""
        return tuple(next(iter(knob.values)) for knob in self.knobs)

    @property
    def settings(self) -> list[Setting]:
        """Every combination."""
        return list(itertools.product(*(knob.values for knob in self.knobs)))

    @property
    def changes(self) -> list[Change]:
        """All changes of all values."""
        return [change for knob in self.knobs for changes in knob.values.values() for change in changes]

    def changes_of(self, setting: Setting) -> tuple[Change, ...]:
        """What brings a server into a setting."""
        parts = (knob.values[value] for knob, value in zip(self.knobs, setting, strict=True))
        return tuple(itertools.chain.from_iterable(parts))

    def command_line(self, setting: Setting) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
        """Flags and variables of a server in a setting."""
        flags, env = dict(self.base), dict[str, str]()
        for change in self.changes_of(setting):
            if change.kind == "flag" and not change.remove:
                flags[change.name] = () if change.value is None else (change.value,)
            elif change.kind == "env" and change.value is not None:
                env[change.name] = change.value
        return flags, env

    def setting_of(self, spec: LaunchSpec, besides: Collection[str] = ()) -> Setting | None:
        """Where on the grid a configuration lies, None beside it; `besides` names what doesn't count."""
        found = [next((value for value, one in knob.values.items() if _shows(spec, one)), None) for knob in self.knobs]
        known = {*self.base, *besides, *(change.name for change in self.changes if change.kind in ("flag", "env"))}
        if None in found or not known >= {*spec.flags, *spec.env}:
            return None
        return tuple(value for value in found if value is not None)


def _knob(one: Mapping[str, Any]) -> Knob:
    values = {value: CHANGES.validate_python(changes) for value, changes in one["values"].items()}
    return Knob(one["name"], tuple(one["tags"]), values)


def _flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = ()
        else:
            last = next(reversed(flags))
            flags[last] = (*flags[last], word)
    return flags


def _shows(spec: LaunchSpec, changes: Iterable[Change]) -> bool:
    for change in changes:
        if change.kind == "flag":
            wanted = None if change.remove else (() if change.value is None else (change.value,))
            if spec.flags.get(change.name) != wanted:
                return False
        elif change.kind == "env" and spec.env.get(change.name) != change.value:
            return False
    return True
