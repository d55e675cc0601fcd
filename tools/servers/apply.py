"""A spec with changes applied, for any adapter: pure, and it refuses rather than guesses."""

from __future__ import annotations

from collections.abc import Sequence

from state.errors import PolicyRefused
from state.models import Change, EnvChange, FlagChange, LaunchSpec, with_beside
from tools.servers.base import FlagTable, ServerAdapter


def applied(adapter: ServerAdapter, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
    """The changed spec; PolicyRefused with the reason of the first change that cannot be carried."""
    for change in changes:
        reason = adapter.check_change(change, known)
        if reason is None and isinstance(change, EnvChange):
            reason = overruled(spec, change, known)
        if reason is not None:
            raise refusal(adapter, change, reason)
        spec = _with(adapter, spec, change, known)
    return spec


def overruled(spec: LaunchSpec, change: EnvChange, known: FlagTable) -> str | None:
    """Why a variable would have no effect: the command line sets the same thing and wins."""
    flag = known.flags.get(known.variables.get(change.name, ""))
    present = next((name for name in (flag.name, flag.opposite) if name in spec.flags), None) if flag else None
    return None if present is None else f"the command line holds {present}, which overrules {change.name}"


def refusal(adapter: ServerAdapter, change: Change, reason: str) -> PolicyRefused:
    """The error for one change."""
    return PolicyRefused(
        f"a change is refused: {change}",
        where={"engine": adapter.engine, "reason": reason},
        do="take the exact flag and value from the server's own --help",
    )


def _with(adapter: ServerAdapter, spec: LaunchSpec, change: Change, known: FlagTable) -> LaunchSpec:
    if isinstance(change, FlagChange):
        return _with_flag(adapter, spec, change, known)
    if isinstance(change, EnvChange):
        return _with_env(spec, change)
    return _revised(spec, beside=with_beside(spec.beside, change))


def _with_flag(adapter: ServerAdapter, spec: LaunchSpec, change: FlagChange, known: FlagTable) -> LaunchSpec:
    argv = adapter.edit_argv(spec.argv, known, change)
    reading = adapter.read_argv(argv, known)
    return _revised(spec, argv=argv, program=reading.program, flags=reading.flags)


def _with_env(spec: LaunchSpec, change: EnvChange) -> LaunchSpec:
    kept = {name: value for name, value in spec.env.items() if name != change.name}
    return _revised(spec, env=kept if change.value is None else kept | {change.name: change.value})


def _revised(spec: LaunchSpec, **fields: object) -> LaunchSpec:
    """A validated copy; `model_copy` would carry the cached fingerprint of the old spec along."""
    return LaunchSpec.model_validate(spec.model_dump() | fields)
