"""What a launch knows about a server that a manager started for it, as POSIX sh; it starts and stops nothing itself.

Such a server is no child of ours: the launch's job follows it. It writes `held` into its folder, one line `PID TICKS
BOOT SPEC`, by which the server is recognised from then on, and lives exactly as long as that process. A server in
another configuration than the original carries `RATCHET_HELD` and `RATCHET_SPEC` in its environment as well. It never
carries `RATCHET_JOB`, by which `StopJobs` finds processes: the manager alone may stop it.
"""

from __future__ import annotations

import shlex

from state.models import Frozen, ProcessId
from tools.job_scripts import STEP_S
from tools.jobs import job_dir
from tools.shell import Host

RECORD = "held"
MARK, SPEC_MARK = "RATCHET_HELD", "RATCHET_SPEC"
LOOK_S = 1
"""How often a follower looks; it runs beside measurements."""


class Launched(Frozen):
    """Which launch of ours had a process started."""

    key: str
    fingerprint: str


async def launch_of(host: Host, root: str, process: ProcessId) -> Launched | None:
    """The launch whose follower recorded this very process, None when none did."""
    line = f"^{process.pid} {process.start_ticks} {process.boot_id} "
    found = await host.check(f"grep -s {shlex.quote(line)} {shlex.quote(root)}/jobs/*/{RECORD} /dev/null; :")
    for told in found.text.splitlines():
        path, _, record = told.partition(f"/{RECORD}:")
        return Launched(key=path.rpartition("/")[2], fingerprint=record.split()[-1])
    return None


def steps(seconds: float) -> int:
    """How many naps of the scripts make up that time."""
    return max(1, round(seconds / STEP_S))


def known_sh(root: str, adopted: ProcessId | None) -> str:
    """Defines `known PID`: whether that process is the adopted one or was started by a launch of ours.

    Needs STAT_SH, and a function `root` that runs a command as somebody who may read the process's environment.
    """
    jobs = shlex.quote(f"{root}/jobs")
    found = "" if adopted is None else f"{adopted.pid} {adopted.start_ticks} {adopted.boot_id}"
    return f"""
known() {{
  stat_of "$1" || return 1
  [ "$1 $st_ticks $boot" = {shlex.quote(found)} ] && return 0
  cat {jobs}/*/{RECORD} 2>/dev/null | grep -q "^$1 $st_ticks $boot " && return 0
  root cat "/proc/$1/environ" 2>/dev/null | tr '\\0' '\\n' | grep -qF {shlex.quote(f"{MARK}={root}/jobs/")}
}}
"""


def place_sh(root: str, key: str) -> str:
    """The start of every follower: `$d` is the job's folder, also when a person runs the script by hand.

    Output is appended, since a manager may write to the same files.
    """
    return f"""
d={shlex.quote(job_dir(root, key))}
RATCHET_JOB=$d/
exec >>"$d/stdout" 2>>"$d/stderr"
"""


def follow_sh(fingerprint: str) -> str:
    """Defines `follow PID`: records the process, and returns when it has ended."""
    return f"""
follow() {{
  stat_of "$1" || return 0
  followed=$st_ticks
  printf '%s %s %s %s\\n' "$1" "$followed" "$boot" {fingerprint} >"$d/{RECORD}.part" &&
    mv -f "$d/{RECORD}.part" "$d/{RECORD}" || echo "ratchet: process $1 could not be recorded" >&2
  while lives "$1" "$followed"; do sleep {LOOK_S}; done
}}
"""
