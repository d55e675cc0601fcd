"""What can be moved on a server, read off the list: which settings change together, and what values each may take.

Pure. It knows no gain and proposes nothing; it never invents a setting that nobody wrote down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from agent.catalogue.entries import book, engines
from agent.catalogue.knowledge import PlainChange
from agent.catalogue.spans import SERVES_LESS, span_of_knob
from state.models import EnvChange, Experiment, FlagChange, Frozen, LaunchSpec

Setting = tuple[PlainChange, ...]
"""Changes that are made together; () leaves things as they are."""
WIDE = 4.0
"""From this ratio of largest to smallest value on, a number is looked at by its logarithm."""


class Range(Frozen):
    """The numbers that a knob may take."""

    low: float
    high: float
    whole: bool

    @property
    def logarithmic(self) -> bool:
        """Whether ratios and not differences matter."""
        return self.low > 0 and self.high / self.low >= WIDE


class Lever(Frozen):
    """Settings of the same flags and variables, of which one at a time can hold."""

    names: tuple[str, ...]
    settings: tuple[Setting, ...]
    tags: frozenset[str] = frozenset()
    ideas: tuple[str, ...] = ()
    """The experiments that they come from."""
    range: Range | None = None
    """For a lever of one number, where further values may lie; None where only what was written down is known."""

    @property
    def name(self) -> str:
        """The names in one word."""
        return "+".join(self.names)


def levers(engine: str, experiments: Iterable[Experiment], found: LaunchSpec) -> tuple[Lever, ...]:
    """The levers of all experiments of flags and variables alone, in the order in which they first appear."""
    groups: dict[tuple[str, ...], list[Experiment]] = {}
    for experiment in experiments:
        if experiment.tries and (setting := plain(experiment)):
            groups.setdefault(tuple(sorted({change.name for change in setting})), []).append(experiment)
    return tuple(_lever(engine, names, group, found) for names, group in groups.items())


def plain(experiment: Experiment) -> Setting:
    """The changes of an experiment of flags and variables alone, () for any other."""
    changes = tuple(change for change in experiment.changes if isinstance(change, FlagChange | EnvChange))
    return changes if len(changes) == len(experiment.changes) else ()


def together(settings: Iterable[Setting]) -> Setting | None:
    """All of them at once, None when they contradict each other; the order is that of the names."""
    merged: dict[str, PlainChange] = {}
    for change in (change for setting in settings for change in setting):
        if merged.setdefault(change.name, change) != change:
            return None
    return tuple(merged[name] for name in sorted(merged))


Point = Mapping[str, str]
"""A configuration by names: what each flag and variable is set to, the engine's default where nothing is said."""


def point(spec: LaunchSpec, names: Iterable[str]) -> dict[str, str]:
    """A configuration at the names."""
    defaults = book(spec.engine).defaults if spec.engine in engines() else {}
    return {name: _said(spec, name, defaults) for name in names}


def moved(at: Point, setting: Setting, defaults: Mapping[str, str]) -> dict[str, str]:
    """The point with a setting made."""
    return {**at, **{change.name: _would_say(change, defaults) for change in setting}}


def defaults_of(engine: str) -> Mapping[str, str]:
    """What the engine does where nothing is said."""
    return book(engine).defaults if engine in engines() else {}


def number(text: str) -> float | None:
    """A value as a finite number, None when it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# --- parts -------------------------------------------------------------------------------------------------

ABSENT = ""
PRESENT = "on"


def _said(spec: LaunchSpec, name: str, defaults: Mapping[str, str]) -> str:
    if name in spec.flags:
        return " ".join(spec.flags[name]) or PRESENT
    return spec.env.get(name, defaults.get(name, ABSENT))


def _would_say(change: PlainChange, defaults: Mapping[str, str]) -> str:
    if isinstance(change, FlagChange) and not change.remove:
        return PRESENT if change.value is None else change.value
    return defaults.get(change.name, ABSENT) if change.value is None else change.value


def _lever(engine: str, names: tuple[str, ...], group: Sequence[Experiment], found: LaunchSpec) -> Lever:
    settings = tuple(dict.fromkeys(tuple(sorted(plain(one), key=lambda change: change.name)) for one in group))
    back = _as_found(names, found)
    return Lever(
        names=names,
        settings=settings if back is None or back in settings else (*settings, back),
        tags=frozenset(tag for one in group for tag in one.tags),
        ideas=tuple(one.id for one in group),
        range=_range(engine, names[0], settings, found) if len(names) == 1 else None,
    )


def _as_found(names: tuple[str, ...], found: LaunchSpec) -> Setting | None:
    """What takes the lever back to what was found; None where that cannot be said in one value."""
    if any(len(found.flags.get(name, ())) > 1 or name in found.hidden_env for name in names):
        return None
    return tuple(
        EnvChange(name=name, value=found.env.get(name))
        if not name.startswith("-")
        else FlagChange(name=name, value=next(iter(found.flags.get(name, ())), None), remove=name not in found.flags)
        for name in names
    )


def _range(engine: str, name: str, settings: Sequence[Setting], found: LaunchSpec) -> Range | None:
    """From the smallest to the largest value that anybody wrote down, or the catalogue's span where it states one."""
    said = [number(_would_say(setting[0], {})) for setting in settings]
    start = number(point(found, (name,))[name])
    values = [value for value in (start, *said) if value is not None]
    if name in SERVES_LESS or len(values) <= len(said):
        return None
    low, high = span_of_knob(engine, name) or (min(values), max(values))
    low, high = min(low, *values), max(high, *values)
    whole = all(value == int(value) for value in values)
    return Range(low=low, high=high, whole=whole) if low < high else None
