"""A server that is a bare process: stopped by identity, started as a detached job; it must not know any engine.

The launch script rebuilds the process from its spec: an empty environment first, then the recorded variables, the
working directory, the limits, and the program in the shell's own place, so that the recorded pid is the server's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from state.errors import ServerError
from state.models import LaunchSpec, ProcessId
from tools.changes.overlay import in_front, there_sh
from tools.jobs import job_dir
from tools.services.base import AwaitPortFree, Operation, StopAdopted, StopJobs
from tools.services.lasting import PLACEHOLDER, VARIABLE, command_line
from tools.services.memory import NOTE_LEVEL_SH, AwaitMemory

SHELLS_OWN = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "LINENO", "OPTIND", "PPID", "SHELLOPTS", "UID"})
"""Variables that bash or dash refuse to have set, or set themselves."""
ULIMITS = {
    "nofile": "n", "core": "c", "data": "d", "fsize": "f", "stack": "s", "as": "v", "cpu": "t", "memlock": "l",
}  # fmt: skip
"""getrlimit names → letters that dash's `ulimit` knows."""
UNITS = {"core": 512, "fsize": 512, "data": 1024, "stack": 1024, "as": 1024, "memlock": 1024}
"""Bytes per unit of `ulimit`, where it does not count single things."""


class BareProcess:
    """Holds a server without a manager."""

    def __init__(self, root: str, port: int, grace_s: float) -> None:
        self.root = root
        self.port = port
        self.grace_s = grace_s

    def plan(self, adopted: ProcessId | None, key: str) -> tuple[Operation, ...]:
        """See `Service.plan`: end what is ours, then wait for the port and the memory."""
        stops: list[Operation] = [StopJobs(root=self.root, shape="*-T*", but=key, grace_s=self.grace_s)]
        if adopted is not None:
            stops.append(StopAdopted(process=adopted, grace_s=self.grace_s))
        waits = (
            AwaitPortFree(port=self.port, within_s=self.grace_s + 10),
            AwaitMemory(root=self.root, but=key, within_s=self.grace_s + 10),
        )
        return (*stops, *waits)

    def launch_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """See `Service.launch_script`."""
        recorded = {name: revealed(value, secrets) for name, value in {**desired.hidden_env, **desired.env}.items()}
        environ = in_front(self.root, desired.beside, recorded)
        plain = {name: value for name, value in sorted(environ.items()) if _shell_holds(name)}
        odd = {name: value for name, value in sorted(environ.items()) if name not in plain}
        words = [revealed(word, secrets) for word in desired.argv]
        lines = [
            # A person runs it by hand when all else failed.
            f'[ -n "${{RATCHET_JOB:-}}" ] || RATCHET_JOB={shlex.quote(job_dir(self.root, key))}/',
            '[ "$RATCHET_CLEAN" = yes ] || '
            'exec env -i RATCHET_CLEAN=yes RATCHET_JOB="$RATCHET_JOB" /bin/sh "$RATCHET_JOB/run.sh"',
            NOTE_LEVEL_SH,
            f"cd {shlex.quote(desired.cwd)} || exit 126",
            *_manners(desired),
            "ratchet_env=$(command -v env)",
            "unset RATCHET_CLEAN PWD OLDPWD",
            f"export RATCHET_LAUNCH={shlex.quote(key)} RATCHET_SPEC={desired.process_fingerprint}",
            *(f"export {name}={shlex.quote(value)}" for name, value in plain.items()),
            *there_sh(self.root, desired.beside).splitlines(),
            *_ulimits(desired),
            f"exec {_carried(odd)}{shlex.join(words)}",
        ]
        return "\n".join(lines) + "\n"

    def lasting(self, desired: LaunchSpec) -> str:
        """See `Service.lasting`: the command line, for whatever starts the server."""
        return command_line(desired)

    def persist_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str | None:
        """See `Service.persist_script`; nobody starts a bare process at a reboot."""
        return None

    def unpersist_script(self, session_id: str) -> str | None:
        """See `Service.unpersist_script`."""
        return None


def revealed(text: str, secrets: dict[str, str]) -> str:
    """The text with the value of each placeholder in it, as in `--api-key=«secret:…»`.

    Raises ServerError when a value is not on the host any more.
    """
    for placeholder in PLACEHOLDER.findall(text):
        if placeholder not in secrets:
            raise ServerError(
                "a secret of the original launch is not in the host's secrets file any more",
                where={"placeholder": placeholder},
                do="start the original server by hand; its environment cannot be rebuilt from here",
            )
    return PLACEHOLDER.sub(lambda found: secrets[found[0]], text)


def _shell_holds(name: str) -> bool:
    return VARIABLE.fullmatch(name) is not None and name not in SHELLS_OWN


def _carried(odd: dict[str, str]) -> str:
    """The start of a command line that brings in by env(1) what a shell would drop, such as bash's exported functions.

    Not for all variables: for an instant its arguments can be seen by every user of the host.
    """
    if not odd:
        return ""
    pairs = shlex.join(f"{name}={value}" for name, value in odd.items())
    return f'"$ratchet_env" {pairs} '


def _manners(desired: LaunchSpec) -> Iterator[str]:
    """Umask, niceness and cores of the recorded process; what cannot be had is said in the launch's log."""
    limits = desired.limits
    if "umask" in limits:
        yield f"umask {shlex.quote(limits['umask'])}"
    if "niceness" in limits:
        nice = shlex.quote(limits["niceness"])
        refused = f'echo "ratchet: niceness {nice} was refused" >&2'
        yield f'[ "$(nice)" = {nice} ] || renice -n {nice} -p $$ >/dev/null || {refused}'
    if "affinity" in limits:
        cores = shlex.quote(limits["affinity"])
        yield (
            f'while read -r name value _; do [ "$name" = Cpus_allowed_list: ] && [ "$value" != {cores} ] && '
            f'{{ taskset -pc {cores} $$ >/dev/null || echo "ratchet: cores {cores} were refused" >&2; }}; '
            "done </proc/$$/status"
        )


def _ulimits(desired: LaunchSpec) -> Iterator[str]:
    """Limits as far as the shell can set them; what this login may not raise is said in the launch's log.

    The number of processes comes last, since nothing may be forked after it; its letter is p in dash and u in bash.
    """
    for name, letter in ULIMITS.items():
        if name in desired.limits:
            yield from _ulimit(name, letter, desired.limits[name])
    if "nproc" in desired.limits:
        yield "(ulimit -u) >/dev/null 2>&1 && ratchet_letter=u || ratchet_letter=p"
        yield from _ulimit("nproc", "$ratchet_letter", desired.limits["nproc"])


def _ulimit(name: str, letter: str, limit: str) -> Iterator[str]:
    """The soft limit goes first, since a hard one cannot be lowered below it, and last, since it may only rise then."""
    unit = UNITS.get(name, 1)
    soft, hard = (v if v == "unlimited" else str(int(v) // unit) for v in limit.split(":"))
    yield f"ulimit -S -{letter} {soft} 2>/dev/null"
    yield f"ulimit -H -{letter} {hard} 2>/dev/null || echo 'ratchet: hard limit {name} {limit} was refused' >&2"
    yield f"ulimit -S -{letter} {soft} 2>/dev/null || echo 'ratchet: soft limit {name} {limit} was refused' >&2"
