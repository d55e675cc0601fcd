"""What an engine's catalogue knows of changes that somebody else proposes; pure, and it proposes nothing itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agent.catalogue.entries import TEMPLATE, ChangeEntry, Entry, ModelTrait, book, engines
from state.models import EnvChange, FlagChange, Frozen, LaunchSpec

PlainChange = FlagChange | EnvChange


class Knowledge(Frozen):
    """What the entries about the same flags and variables say."""

    tags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    numerics: bool = True
    objections: tuple[str, ...] = ()


def knowledge(
    engine: str, changes: Sequence[PlainChange], spec: LaunchSpec, model: frozenset[ModelTrait] | None
) -> Knowledge:
    """What is known of these changes; `spec` is the configuration with them.

    Nothing known of a flag means that it may change the numbers that the model computes with.
    """
    entries = [one for entry in _entries(engine) for one in entry.each()]
    about = [entry for entry in entries if any(_touches(one, change) for one in entry.changes for change in changes)]
    known = {
        change.name for change in changes if any(_touches(one, change) for entry in about for one in entry.changes)
    }
    return Knowledge(
        tags=tuple(dict.fromkeys(tag for entry in about for tag in entry.tags)),
        needs=tuple(dict.fromkeys(need for entry in about if _holds(entry, changes) for need in entry.needs)),
        numerics=any(entry.numerics for entry in about) or known != {change.name for change in changes},
        objections=tuple(dict.fromkeys(_objections(about, changes, spec, model))),
    )


def known_names(engine: str, gpus: int) -> tuple[str, ...]:
    """Flags and variables that the engine's catalogue knows, for a host with so many GPUs."""
    entries = [entry for entry in _entries(engine) if gpus or not {"gpus", "sm"} & entry.when.at_least.keys()]
    return tuple(dict.fromkeys(one.flag or one.env or "" for entry in entries for one in entry.changes))


def known_values(engine: str, name: str, cores: int) -> tuple[tuple[str, ...], tuple[float, float] | None]:
    """Values of a flag or variable that the catalogue thought of, and its sensible span; of hosts only cores count."""
    entries = [one for entry in _entries(engine) for one in entry.each()]
    values: list[str] = []
    span = None
    for entry in entries:
        own = [one for one in entry.changes if name in (one.flag, one.env)]
        filled = (_CORES.sub(str(cores), one.value) for one in own if one.value is not None)
        values += [value for value in filled if not TEMPLATE.search(value)]
        span = entry.span if own and entry.span is not None and len(entry.changes) == 1 else span
    return tuple(dict.fromkeys(values)), span


_CORES = re.compile(r"\{cores\}")


def _entries(engine: str) -> Sequence[Entry]:
    return book(engine).experiments if engine in engines() else ()


def _objections(
    about: Sequence[Entry], changes: Sequence[PlainChange], spec: LaunchSpec, model: frozenset[ModelTrait] | None
) -> Iterator[str]:
    for entry in about:
        yield from _out_of_span(entry, changes)
        if not _holds(entry, changes):
            continue
        clashing = [name for name in entry.conflicts if name in spec.flags or name in spec.env]
        if clashing:
            yield f"does not go with {', '.join(clashing)}, which would be set too"
        wanting = [name for name in entry.requires if name not in spec.flags and name not in spec.env]
        if wanting:
            yield f"makes sense only beside {', '.join(wanting)}, which would not be set"
        lacking = [trait for trait in entry.model if model is not None and trait not in model]
        if lacking:
            yield f"is for models that are {', '.join(lacking)}"


def _out_of_span(entry: Entry, changes: Sequence[PlainChange]) -> Iterator[str]:
    """The span of an entry is that of its one knob."""
    if entry.span is None or len(entry.changes) != 1:
        return
    low, high = entry.span
    for change in changes:
        number = _number(change.value) if _touches(entry.changes[0], change) else None
        if number is not None and not low <= number <= high:
            yield f"{change.name}: {change.value} lies outside what is sensible, {low:.10g} to {high:.10g}"


def _holds(entry: Entry, changes: Sequence[PlainChange]) -> bool:
    """Whether all that the entry changes is among the changes, with the same values."""
    return bool(entry.changes) and all(any(_is(one, change) for change in changes) for one in entry.changes)


def _touches(written: ChangeEntry, change: PlainChange) -> bool:
    return change.name == (written.flag if isinstance(change, FlagChange) else written.env)


def _is(written: ChangeEntry, change: PlainChange) -> bool:
    if not _touches(written, change):
        return False
    removes = change.remove if isinstance(change, FlagChange) else change.value is None
    if written.remove or removes:
        return written.remove == removes
    # What a host's numbers fill in can be any of them.
    return written.value == change.value or bool(written.value and TEMPLATE.search(written.value))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
