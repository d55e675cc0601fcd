"""Detached jobs on a host: started once, found again by key, ended by identity; it must not know what they compute.

A job lives in `ROOT/jobs/KEY/` and outlives the connection and the agent:

    run.sh    the command        begun/   made by the first wrapper, which thereby may run: start-once
    wrapper   its identity       process  the command's identity, written before the command begins
    stdout    stderr             exit     the exit code, 128 + n for signal n, renamed into place
    launch.log                            what the wrapper itself complained about

An identity is `PID START_TICKS BOOT_ID`. Nothing is ever signalled by name, and nothing by a number whose start time
was not compared in the same breath.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from state.errors import CommandFailed
from state.models import Frozen, ProcessId
from tools.job_scripts import look_script, prepare_script, start_script, stop_script
from tools.shell import CHUNK_BYTES, CommandResult, Host

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STARTED_WITHIN_S = 10.0
"""How long a wrapper may take to begin; forking under memory pressure has been seen to take seconds."""

Phase = Literal["absent", "prepared", "running", "ended", "vanished"]


class JobState(Frozen):
    """What a look at a job shows."""

    phase: Phase = Field(description="vanished: begun, without exit code, and its process is gone")
    process: ProcessId | None = Field(default=None, description="the command, None when it was never recorded")
    exit: int | None = Field(default=None, description="128 + n when it died of signal n")
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    @property
    def over(self) -> bool:
        """True when it will not change any more."""
        return self.phase in ("ended", "vanished")


def job_dir(root: str, key: str) -> str:
    """Where the job lives; ValueError for a key or a root that could lead elsewhere."""
    if not root.startswith("/") or "\0" in root or "\n" in root:
        raise ValueError(f"the root of jobs must be an absolute path: {root!r}")
    return f"{root.rstrip('/')}/jobs/{_name(key)}"


async def start(
    host: Host, root: str, key: str, script: str, *, marker_env: Mapping[str, str] | None = None
) -> JobState:
    """Start the job unless it was started before; returns when its process is recorded.

    Calling it again, even at the same time, never starts a second run, and after a crash it starts what had not begun.
    The command is the text of a POSIX sh script; if that ends in `exec PROGRAM`, the recorded pid is the program's.
    All of its descendants carry `marker_env` and `RATCHET_JOB` in their environment; no secrets, since these stand in
    the wrapper's command line. Raises CommandFailed when the job could not begin.
    """
    exports = "".join(f"export {_variable(k)}={shlex.quote(v)}\n" for k, v in (marker_env or {}).items())
    stdin = script.encode("utf-8", "surrogateescape")
    text = start_script(job_dir(root, key), exports, len(stdin), STARTED_WITHIN_S)
    return parse_look((await _send(host, root, key, text, stdin, "a job could not be started")).text)


async def prepare(host: Host, root: str, key: str, script: str) -> None:
    """Put everything in place that `start` needs, so that it will not fail for want of space; begins nothing.

    To be done before something is stopped to make way for the job. Raises CommandFailed.
    """
    stdin = script.encode("utf-8", "surrogateescape")
    text = prepare_script(job_dir(root, key), len(stdin))
    await _send(host, root, key, text, stdin, "a job could not be prepared; nothing was stopped for it")


async def look(host: Host, root: str, key: str) -> JobState:
    """What has become of the job; a process that has just ended is given time to leave its exit code."""
    result = await host.check(look_script(job_dir(root, key)))
    return parse_look(result.text)


async def read(host: Host, root: str, key: str, name: str, *, offset: int = 0, limit: int = CHUNK_BYTES) -> bytes:
    """Bytes of one of the job's files from `offset` on; CommandFailed when it is not there."""
    return await host.get(f"{job_dir(root, key)}/{_name(name)}", offset=offset, limit=limit)


async def tail(host: Host, root: str, key: str, name: str, lines: int = 40) -> str:
    """The last lines of one of the job's files; bytes that are not UTF-8 become U+FFFD."""
    path = f"{job_dir(root, key)}/{_name(name)}"
    return (await host.check(f"tail -n {lines:d} <{shlex.quote(path)}")).text


async def stop(host: Host, root: str, key: str, grace_s: float = 10.0) -> JobState:
    """End the job and everything it started: TERM to the command, after `grace_s` KILL to all that is left.

    What belongs to it is found by descent, by session while a member of it is proven ours, and by `RATCHET_JOB` in the
    environment. Safe to repeat. Raises CommandFailed when something would not die.
    """
    directory = job_dir(root, key)
    result = await host.run(stop_script(directory, grace_s), timeout_s=grace_s + 60)
    if not result.ok:
        raise CommandFailed(
            "a job could not be ended",
            where={"host": host.name, "key": key, "directory": directory, "ended": result.ending},
            tail=result.tail,
            do="look at the processes named above on the host; state D means that they hang in the kernel",
        )
    return parse_look(result.text)


def parse_look(text: str) -> JobState:
    """Read what `look_script` prints: lines of a name and its values. ValueError when it is something else."""
    found = {name: values for name, *values in (line.split() for line in text.splitlines() if line.strip())}
    if "phase" not in found:
        raise ValueError(f"not a job's state: {text[:200]!r}")
    process = found.get("process")
    return JobState.model_validate(
        {
            "phase": found["phase"][0],
            "process": {"pid": process[0], "start_ticks": process[1], "boot_id": process[2]} if process else None,
            "exit": found["exit"][0] if "exit" in found else None,
            "stdout_bytes": found.get("stdout", ["0"])[0],
            "stderr_bytes": found.get("stderr", ["0"])[0],
        }
    )


async def _send(host: Host, root: str, key: str, text: str, stdin: bytes, refused: str) -> CommandResult:
    result = await host.run(text, stdin=stdin, timeout_s=STARTED_WITHIN_S + 30)
    if result.ok:
        return result
    raise CommandFailed(
        refused,
        where={"host": host.name, "key": key, "directory": job_dir(root, key), "ended": result.ending},
        tail=result.tail,
        do="check that the directory is writable, the disk is not full, and that setsid (util-linux) is installed",
    )


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"only letters, digits, '.', '_' and '-' may name a job or its files: {name!r}")
    return name


def _variable(name: str) -> str:
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"not the name of an environment variable: {name!r}")
    return name
