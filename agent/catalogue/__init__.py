"""What is known about each engine's knobs, fitted to a host: pure; it must not run, measure or rank anything.

The knowledge is data (`llamacpp.toml`). An entry that does not apply is left out, and the reason is kept, because
"why was this never tried?" is a question that people ask in the morning.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.catalogue.entries import TEMPLATE, Book, Entry, book
from state.models import CHANGE_DISRUPTION, EnvChange, Experiment, FlagChange, Frozen, Source

__all__ = ["Catalogue", "CatalogueFacts", "experiments", "fitted", "numbers"]

AUTO_SLOTS = 4
"""Slots that llama-server makes by itself, with a unified KV cache, when --parallel is absent or negative."""


class CatalogueFacts(Frozen):
    """What decides whether an entry applies: the host, the live flag list, and the parent's configuration."""

    cores: int
    known_flags: frozenset[str]
    flags: dict[str, tuple[str, ...]]
    env: dict[str, str]
    mem_available_mb: float
    gpus: int
    engine_version: str


class Catalogue(Frozen):
    """The experiments that apply, in the catalogue's order, and (id, reason) for each that does not."""

    experiments: tuple[Experiment, ...]
    dropped: tuple[tuple[str, str], ...]


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
    for entry in catalogue.experiments:
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
    _check_flags(entry, facts)
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
        source=Source(kind="catalogue", ref=entry.source),
    )


def _check_flags(entry: Entry, facts: CatalogueFacts) -> None:
    lacking = sorted({change.flag for change in entry.changes if change.flag} - facts.known_flags)
    if lacking:
        raise _Drop(f"this server has no {', '.join(lacking)}")
    clashing = [name for name in entry.conflicts if name in facts.flags or name in facts.env]
    if clashing:
        raise _Drop(f"does not go with {', '.join(clashing)}, which is set")


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
    if change.name in facts.flags:
        return facts.flags[change.name] == (() if change.value is None else (change.value,))
    return change.value is not None and defaults.get(change.name) == change.value


def numbers(facts: CatalogueFacts) -> dict[str, float]:
    """The names that values and conditions use; what the parent leaves to the server is absent.

    `ctx_per_slot` is the longest context of one request: llama-server divides --ctx-size by the slots, unless they
    share one (`unified`).
    """
    threads = _number(facts, "--threads")
    slots, unified = _slots(facts)
    context = _number(facts, "--ctx-size")
    found = {
        "cores": facts.cores,
        "half_cores": max(1, facts.cores // 2),
        "spare_cores": max(1, facts.cores - 1),
        "gpus": facts.gpus,
        "mem_available_mb": facts.mem_available_mb,
        "threads": threads,
        "threads_batch": _number(facts, "--threads-batch") or threads,
        "slots": slots,
        "unified": int(unified),
        "ctx_per_slot": context if context is None or unified else context // slots,
        "quantised_v": int(facts.flags.get("--cache-type-v", ("f16",))[-1:] not in (("f32",), ("f16",), ("bf16",))),
        "flash_attn_off": int(facts.flags.get("--flash-attn") == ("off",)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _slots(facts: CatalogueFacts) -> tuple[int, bool]:
    asked = _number(facts, "--parallel")
    if "--no-kv-unified" in facts.flags and asked is not None:
        return asked, False
    return asked or AUTO_SLOTS, asked is None or "--kv-unified" in facts.flags


def _number(facts: CatalogueFacts, flag: str) -> int | None:
    """A flag's positive number; None when it is absent, or 0 or less, which leave the choice to the server."""
    values = facts.flags.get(flag, ())
    try:
        value = int(values[-1]) if values else 0
    except ValueError:
        return None
    return value if value > 0 else None
