"""Which of a server's flags are open to experiments, as its own help and its adapter have it; pure."""

from __future__ import annotations

from state.models import FlagChange
from tools.servers.base import FlagTable, KnownFlag, ServerAdapter


def knobs(adapter: ServerAdapter, known: FlagTable) -> tuple[KnownFlag, ...]:
    """Those that may be changed, in the order of the help."""
    return tuple(flag for flag in known.flags.values() if not flag.removed and _is_open(adapter, known, flag))


def _is_open(adapter: ServerAdapter, known: FlagTable, flag: KnownFlag) -> bool:
    """What may be dropped may be set: an adapter closes a flag, never one of its values."""
    dropped = FlagChange(name=flag.name, remove=True)
    return flag.name not in adapter.secret_flags and adapter.check_change(dropped, known) is None
