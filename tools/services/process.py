"""A server that is a bare process: stopped by identity, started as a detached job; it must not know any engine.

The launch script rebuilds the process from its spec: an empty environment first, then the recorded variables, the
working directory, the limits, and the program in the shell's own place, so that the recorded pid is the server's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from state.errors import ServerError
from state.models import LaunchSpec, ProcessId
from tools.services.base import AwaitPortFree, Operation, StopAdopted, StopJob

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ULIMITS = {"nofile": "n", "core": "c", "data": "d", "fsize": "f", "stack": "s", "as": "v", "cpu": "t"}
"""getrlimit names → letters that dash's `ulimit` knows."""
UNITS = {"core": 512, "fsize": 512, "data": 1024, "stack": 1024, "as": 1024}
"""Bytes per unit of `ulimit`, where it does not count single things."""


class BareProcess:
    """Holds a server without a manager."""

    def __init__(self, root: str, port: int, grace_s: float) -> None:
        self.root = root
        self.port = port
        self.grace_s = grace_s

    def plan(
        self, running: tuple[str, ...], adopted: ProcessId | None, desired: LaunchSpec, key: str
    ) -> tuple[Operation, ...]:
        """See `Service.plan`: end what is ours, then wait for the port."""
        stops: list[Operation] = [
            StopJob(root=self.root, key=other, grace_s=self.grace_s) for other in running if other != key
        ]
        if adopted is not None:
            stops.append(StopAdopted(process=adopted, grace_s=self.grace_s))
        return (*stops, AwaitPortFree(port=self.port, within_s=self.grace_s + 10))

    def launch_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """See `Service.launch_script`."""
        lines = [
            '[ "$RATCHET_CLEAN" = yes ] || '
            'exec env -i RATCHET_CLEAN=yes RATCHET_JOB="$RATCHET_JOB" /bin/sh "$RATCHET_JOB/run.sh"',
            "unset RATCHET_CLEAN PWD OLDPWD",
            f"export RATCHET_LAUNCH={shlex.quote(key)}",
            *_exports(desired, secrets),
            f"cd {shlex.quote(desired.cwd)} || exit 126",
            *_ulimits(desired),
            f"exec {shlex.join(revealed(word, secrets) for word in desired.argv)}",
        ]
        return "\n".join(lines) + "\n"


def revealed(text: str, secrets: dict[str, str]) -> str:
    """A placeholder's value, any other text as it is. Raises ServerError when the value is not on the host any more."""
    if not text.startswith("«secret:"):
        return text
    if text not in secrets:
        raise ServerError(
            "a secret of the original launch is not in the host's secrets file any more",
            where={"placeholder": text},
            do="start the original server by hand; its environment cannot be rebuilt from here",
        )
    return secrets[text]


def _exports(desired: LaunchSpec, secrets: dict[str, str]) -> Iterator[str]:
    for name, value in sorted({**desired.hidden_env, **desired.env}.items()):
        if VARIABLE.fullmatch(name):
            yield f"export {name}={shlex.quote(revealed(value, secrets))}"


def _ulimits(desired: LaunchSpec) -> Iterator[str]:
    """Limits as far as the shell can set them; raising one may be refused, which `adopt` has to foresee."""
    for name, letter in ULIMITS.items():
        soft, _, hard = desired.limits.get(name, "").partition(":")
        for kind, value in (("H", hard), ("S", soft)):
            if value:
                amount = value if value == "unlimited" else str(int(value) // UNITS.get(name, 1))
                yield f"ulimit -{kind} -{letter} {amount} 2>/dev/null"
