"""A person's own commands as an aside: run without a shell, word for word; it runs nothing itself."""

from __future__ import annotations

import shlex

from state.models import CommandChange
from tools.changes.base import Aside, Planned

UNTOLD = 2
"""How a probe ends that could not be run."""


def aside(plan: Planned, change: CommandChange) -> Aside:
    """The aside of one command."""
    files = {"probe": probe_sh(change), "do": _run_sh(change.do), "undo": _run_sh(change.undo)}
    texts = {name: text.encode("utf-8", "surrogateescape") for name, text in files.items()}
    return Aside(plan.digest, plan.when, str(change), texts)


def probe_sh(change: CommandChange) -> str:
    """Sh that ends with 0 when it is in effect, 1 when it is not, `UNTOLD` when the probe cannot be run."""
    return f"""
{shlex.join(change.probe)} </dev/null
case $? in 0) exit 0 ;; 126 | 127) exit {UNTOLD} ;; *) exit 1 ;; esac
"""


def _run_sh(words: tuple[str, ...]) -> str:
    return f"exec {shlex.join(words)} </dev/null\n"
