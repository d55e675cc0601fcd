"""Named points at which the crash suite kills this very process; in normal runs nothing of it is active.

The wish stands in one environment variable, RATCHET_FAULT, as `MODE:ARGUMENT`:

    at:NAME     SIGKILL to this process when it first passes the point NAME
    nth:N       SIGKILL at the N-th point that it passes, whatever its name
    list:FILE   append the name of every point that is passed, and go on
    walk:FILE   SIGKILL at the first point whose name is not in FILE, after adding it there: a chain of resumes with
                the same FILE is killed once at every point in turn, and then ends

It must not know what is done between the points. The signal is a real one: no handler runs, nothing is flushed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from state.errors import ConfigError
from state.journal import FaultPoint, no_fault

VARIABLE = "RATCHET_FAULT"


def fault_point(environ: Mapping[str, str]) -> FaultPoint:
    """The fault point that the environment asks for. Raises ConfigError for a wish that cannot be read."""
    wish = environ.get(VARIABLE)
    if wish is None:
        return no_fault
    mode, _, argument = wish.partition(":")
    if mode not in MODES or not argument or (mode == "nth" and not (argument.isdecimal() and int(argument) > 0)):
        raise ConfigError(
            f"{VARIABLE} is not a fault to be made",
            where={"it says": wish},
            do=f"use MODE:ARGUMENT with one of {', '.join(MODES)} (N counts from 1), or unset it",
        )
    return MODES[mode](argument)


def die() -> None:
    """End this process as the kernel would for lack of memory: at once, and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def _at(name: str) -> FaultPoint:
    def point(passed: str) -> None:
        if passed == name:
            die()

    return point


def _nth(number: str) -> FaultPoint:
    left = int(number)

    def point(passed: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    return point


def _list(file: str) -> FaultPoint:
    return lambda passed: _note(Path(file), passed)


def _walk(file: str) -> FaultPoint:
    path = Path(file)
    seen = set(path.read_text().splitlines()) if path.exists() else set()

    def point(passed: str) -> None:
        if passed not in seen:
            _note(path, passed)
            die()

    return point


def _note(path: Path, passed: str) -> None:
    """Add a name so that it is on the disk before anything else happens."""
    with path.open("a") as names:
        names.write(f"{passed}\n")
        names.flush()
        os.fsync(names.fileno())


MODES: dict[str, Callable[[str], FaultPoint]] = {"at": _at, "nth": _nth, "list": _list, "walk": _walk}
