"""What is known about each engine's knobs, fitted to a host: pure; it must not run, measure or rank anything.

The knowledge is data, one TOML file for each engine. An entry that does not apply is left out, and the reason is kept,
because "why was this never tried?" is a question that people ask in the morning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.catalogue.entries import TEMPLATE, Book, Entry, book, engines
from agent.catalogue.facts import Catalogue, CatalogueFacts
from agent.catalogue.numbers import numbers
from state.models import CHANGE_DISRUPTION, EnvChange, Experiment, FlagChange, Source

__all__ = ["Catalogue", "CatalogueFacts", "engines", "experiments", "fitted", "numbers"]


class _Drop(Exception):
    """Why one entry does not apply."""


def experiments(engine: str, facts: CatalogueFacts) -> Catalogue:
    """The engine's packaged catalogue for this host and parent; ConfigError for an engine without one.

    Nothing is known of a generic server: its experiments stand in the session file.
    """
    return fitted(Book(experiments=()) if engine == "generic" else book(engine), facts)


def fitted(catalogue: Book, facts: CatalogueFacts) -> Catalogue:
    """A catalogue's entries that are possible here and would change something."""
    known = numbers(facts)
    found: list[Experiment] = []
    dropped: list[tuple[str, str]] = []
    seen: dict[frozenset[str], str] = {}
    for entry in (one for written in catalogue.experiments for one in written.each()):
        try:
            experiment = _fit(entry, facts, known, catalogue.defaults)
        except _Drop as reason:
            dropped.append((entry.id, str(reason)))
            continue
        same = seen.setdefault(frozenset(map(str, experiment.changes)), entry.id)
        if same == entry.id:
            found.append(experiment)
        else:
            dropped.append((entry.id, f"on this host it is the same as {same}"))
    return Catalogue(experiments=tuple(found), dropped=tuple(dropped))


def _fit(entry: Entry, facts: CatalogueFacts, known: Mapping[str, float], defaults: Mapping[str, str]) -> Experiment:
    _check_version(entry, facts)
    _check_flags(entry, facts)
    _check_model(entry, facts)
    _check_conditions(entry, known)
    filled = [change.change(None if change.value is None else _filled(change.value, known)) for change in entry.changes]
    changes = tuple(change for change in filled if not _holds(change, facts, defaults))
    if filled and not changes:
        raise _Drop(f"nothing to change: {', '.join(map(str, filled))} holds already")
    implied = max((CHANGE_DISRUPTION[change.kind] for change in changes), default=None)
    disruption = max(level for level in (implied, entry.disruption) if level is not None)
    return Experiment(
        id=entry.id,
        title=_filled(entry.title, known),
        hypothesis=entry.hypothesis,
        changes=changes,
        tags=entry.tags,
        tier=entry.tier,
        priority=entry.priority,
        expected_gain=entry.expected_gain,
        risk=entry.risk,
        needs=entry.needs,
        load_hint=entry.load_hint,
        disruption=disruption,
        numerics=entry.numerics,
        source=Source(kind="catalogue", ref=entry.source),
    )


def _check_version(entry: Entry, facts: CatalogueFacts) -> None:
    """A version that cannot be read excludes nothing; whether a flag is there yet is asked of the live list alone."""
    running = _version(facts.engine_version)
    if running is None:
        return
    if entry.until is not None and running >= (_version(entry.until) or ()):
        raise _Drop(f"from version {entry.until} on it does nothing or is spelled anew, this is {facts.engine_version}")
    sets_variable = any(change.env is not None for change in entry.changes)
    if entry.since is not None and sets_variable and running < (_version(entry.since) or ()):
        raise _Drop(f"known from version {entry.since} on, this is {facts.engine_version}")


def _version(text: str) -> tuple[int, ...] | None:
    """`0.5.17` and `v0.5.17rc1` as numbers."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return None if found is None else tuple(map(int, found[1].split(".")))


def _check_flags(entry: Entry, facts: CatalogueFacts) -> None:
    lacking = sorted({change.flag for change in entry.changes if change.flag} - facts.known_flags)
    if lacking:
        raise _Drop(f"this server has no {', '.join(lacking)}")
    clashing = [name for name in entry.conflicts if name in facts.flags or name in facts.env]
    if clashing:
        raise _Drop(f"does not go with {', '.join(clashing)}, which is set")
    wanting = [name for name in entry.requires if name not in facts.flags and name not in facts.env]
    if wanting:
        raise _Drop(f"makes sense only beside {', '.join(wanting)}, which is not set")


def _check_model(entry: Entry, facts: CatalogueFacts) -> None:
    lacking = [trait for trait in entry.model if facts.model is not None and trait not in facts.model]
    if lacking:
        raise _Drop(f"is for models that are {', '.join(lacking)}")
    unwanted = [trait for trait in entry.not_model if facts.model is not None and trait in facts.model]
    if unwanted:
        raise _Drop(f"is not for models that are {', '.join(unwanted)}")


def _check_conditions(entry: Entry, known: Mapping[str, float]) -> None:
    for wanted, limits in (("at least", entry.when.at_least), ("below", entry.when.below)):
        for name, limit in limits.items():
            value, bound = known.get(name), known.get(limit) if isinstance(limit, str) else limit
            if value is None or bound is None:
                continue
            if (value < bound) != (wanted == "below"):
                raise _Drop(f"wants {name} {wanted} {bound:g}, it is {value:g}")


def _filled(text: str, known: Mapping[str, float]) -> str:
    """The text with `{name}` and `{name*3}` replaced by whole numbers."""
    for name, factor in TEMPLATE.findall(text):
        if name not in known:
            raise _Drop(f"{name} is not stated by the running configuration")
        template = f"{{{name}*{factor}}}" if factor else f"{{{name}}}"
        text = text.replace(template, f"{known[name] * int(factor or 1):.0f}")
    return text


def _holds(change: FlagChange | EnvChange, facts: CatalogueFacts, defaults: Mapping[str, str]) -> bool:
    """Whether the parent has it so already, by its flags and variables or by the engine's default."""
    if isinstance(change, EnvChange):
        return facts.env.get(change.name) == change.value
    if change.remove:
        return change.name not in facts.flags
    if change.name in facts.flags:
        return facts.flags[change.name] == (() if change.value is None else (change.value,))
    return change.value is not None and defaults.get(change.name) == change.value
