"""The JSON schemas of a language model's answer, exact and general; pure, and they promise nothing: the screen judges.

Only words that OpenAI's strict mode and llama.cpp's grammars both understand are used: `anyOf` of closed objects that
differ in their first property, `const`, `enum`, `pattern`, bounds of integers and of lengths of lists. A text is
bounded by its pattern, and a fraction by a list, since neither takes a bound of its own everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.planners.answer import CHANGES, LOOK_UPS, PROPOSALS
from agent.planners.dials import TEXT, Dial

MOST_NAMES = 400
"""With more names than this a schema does not list them: endpoints bound the size of what they are sent."""
MOST_DIALS = 80
"""So many have a branch of their own; OpenAI takes 1000 listed values in all."""
EXPERIMENTS, PER_EXPERIMENT = 3, 2
GAINS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
PLAIN = "[A-Za-z0-9 ,.;:()%+/'_-]"
FREE: Mapping[str, Any] = {"type": "string"}

Schema = Mapping[str, Any]


def exact(dials: Sequence[Dial], look_ups: Sequence[Schema], least: int) -> Schema:
    """An answer that can hardly name what is not there: `least` experiments or more, values that could be right."""
    branches = [*_own(dials), *_shared(dials)]
    if not branches:
        return general(())
    experiment = _object(
        title=_line(3, 60),
        hypothesis=_line(10, 200),
        changes=_list(_any(branches), 1, PER_EXPERIMENT),
        expected_gain={"type": "number", "enum": list(GAINS)},
        risk=_line(0, 80),
    )
    wishes = _list(_any(look_ups), 0, LOOK_UPS) if look_ups else {"type": "array", "items": FREE, "maxItems": 0}
    return _object(look_ups=wishes, experiments=_list(experiment, least, EXPERIMENTS), reason=_line(10, 200))


def general(names: Sequence[str]) -> Schema:
    """For endpoints that refuse the exact one: the same form with free texts; `names` are what may be changed."""
    name = {**FREE, "enum": list(names)} if 0 < len(names) <= MOST_NAMES else FREE
    change = _object(
        kind={**FREE, "enum": ["flag", "env"]},
        name=name,
        action={**FREE, "enum": ["set", "remove"]},
        value={"type": ["string", "null"]},
    )
    experiment = _object(
        title=FREE,
        hypothesis=FREE,
        changes=_list(change, 1, CHANGES),
        expected_gain={"type": "number"},
        risk=FREE,
    )
    look_up = _object(kind={**FREE, "enum": ["help", "log", "telemetry", "source"]}, of=FREE, files=FREE)
    return _object(
        look_ups={"type": "array", "items": look_up, "maxItems": LOOK_UPS},
        experiments={"type": "array", "items": experiment, "maxItems": PROPOSALS},
        reason=FREE,
    )


def wishes(flags: Sequence[str], ids: Sequence[str], source: bool) -> tuple[Schema, ...]:
    """What may be looked up in this session, a schema for each kind."""
    found = []
    if flags:
        found.append(_wish("help", {**FREE, "enum": list(flags[:MOST_DIALS])}))
    found.append(_wish("log", {**FREE, "enum": [*ids[-MOST_DIALS:], "server"]}))
    if ids:
        found.append(_wish("telemetry", {**FREE, "enum": list(ids[-MOST_DIALS:])}))
    if source:
        found.append(_wish("source", _line(3, 60), {"type": "string", "pattern": "^[A-Za-z0-9_.*?-]{1,40}$"}))
    return tuple(found)


# --- parts -------------------------------------------------------------------------------------------------


def _own(dials: Sequence[Dial]) -> list[Schema]:
    """A branch for each whose values are known; the name comes first and tells them apart."""
    known = [dial for dial in dials if dial.value is not None]
    return [_change(dial, {"type": "string", "const": dial.name}, dial.value or TEXT) for dial in known[:MOST_DIALS]]


def _shared(dials: Sequence[Dial]) -> list[Schema]:
    """One branch for all flags, and one for all variables, that take a text."""
    open_ = [dial for dial in dials if dial.value is None]
    branches = []
    for kind in ("flag", "env"):
        same = [dial for dial in open_ if dial.kind == kind][:MOST_NAMES]
        if same:
            branches.append(_change(same[0], {**FREE, "enum": [dial.name for dial in same]}, TEXT))
    return branches


def _change(dial: Dial, name: Schema, value: Schema) -> Schema:
    kind, action = ({"type": "string", "const": word} for word in (dial.kind, dial.action))
    return _object(name=name, kind=kind, action=action, value=value)


def _wish(kind: str, of: Schema, files: Schema | None = None) -> Schema:
    return _object(kind={"type": "string", "const": kind}, of=of, files=files or {"type": "string", "const": ""})


def _line(least: int, most: int) -> Schema:
    """One line of plain text of a bounded length."""
    return {"type": "string", "pattern": f"^{PLAIN}{{{least},{most}}}$"}


def _list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _any(branches: Sequence[Schema]) -> Schema:
    return branches[0] if len(branches) == 1 else {"anyOf": list(branches)}


def _object(**properties: Schema) -> Schema:
    """Strict schemas want every property required and no other allowed."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
