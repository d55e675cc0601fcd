"""Taking a server out of its users' way and giving it back, as POSIX sh; it knows no load balancer and decides nothing.

How that is done, a person says: three commands on the host. The operations look first, so that they may be run again
after any interruption; the agent runs them over SSH, and the host's watcher has the same text in its restore script.
A file of ours on the host, `drained`, says that it was us: what somebody else took out is never put back.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from state.models import Frozen
from tools.facts.base import Fact, as_text
from tools.procfs import STAT_SH
from tools.services.held import steps
from tools.target import Drained

MARK, SAID = "drained", "drain.log"
"""Files in our folder: that we took the server out, and what the commands said last."""


class Draining(Frozen):
    """The commands of a person, as words that are run without a shell."""

    drain: tuple[str, ...] = Field(min_length=1)
    undrain: tuple[str, ...] = Field(min_length=1)
    drained: tuple[str, ...] = Field(default=(), description="exits 0 exactly while it is drained; () where none can")
    deadline_s: float = Field(gt=0, description="for each command, and for the probe to say what was wanted")


class Drain(Frozen):
    """Take the server out; nothing to do when the probe says that it is out already, whoever did it."""

    op: Literal["drain"] = "drain"
    root: str
    draining: Draining

    def render(self) -> str:
        """Sh that fails, with the last words of the command, unless the server is out of its users' way."""
        return f"""(
{_common(self.draining, f"{self.root}/{SAID}")}
mark={shlex.quote(f"{self.root}/{MARK}")}
looked || exit 1
if [ "$seen" = yes ]; then
  [ -e "$mark" ] || echo "it was drained by somebody else already, and stays so"
  exit 0
fi
true >"$mark" || exit 1
within {shlex.join(self.draining.drain)} || failed "the drain command ended with exit $?"
until_seen yes || failed "the drain command ended well, but the probe does not say that the server is drained"
)"""


class Undrain(Frozen):
    """Give the server back to its users, if it was us who took it out."""

    op: Literal["undrain"] = "undrain"
    root: str
    draining: Draining

    def render(self) -> str:
        """Sh that fails, with the last words of the command, when the server is still out by our doing."""
        return f"""(
mark={shlex.quote(f"{self.root}/{MARK}")}
[ -e "$mark" ] || exit 0
{_common(self.draining, f"{self.root}/{SAID}")}
looked 2>/dev/null
if [ "$seen" != no ]; then
  within {shlex.join(self.draining.undrain)} || failed "the undrain command ended with exit $?"
  until_seen no || failed "the undrain command ended well, but the probe says that the server is still drained"
fi
rm -f "$mark"
)"""


@dataclass(frozen=True)
class DrainedFact(Fact[Drained]):
    """Whether the server is drained, and whether that was us; the probe is run, nothing is written."""

    root: str
    draining: Draining

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """The probe's own time and some for the way."""
        return self.draining.deadline_s + 30

    def command(self) -> str:
        """Two lines: who did it, and what the probe says."""
        return f"""
{_common(self.draining, "/dev/null")}
if [ -e {shlex.quote(f"{self.root}/{MARK}")} ]; then echo ours; else echo "not ours"; fi
looked 2>&1 && echo "seen $seen"
:"""

    def parse(self, output: bytes) -> Drained:
        """Anything else in the second line is why the probe cannot tell."""
        first, *others = as_text(output).splitlines()
        told = " ".join(others)
        seen = {"seen yes": True, "seen no": False, "seen ": None, "seen": None}
        if first not in ("ours", "not ours") or not told:
            raise ValueError("it has no line for the mark and one for the probe")
        known = told in seen
        return Drained(ours=first == "ours", seen=seen.get(told), trouble="" if known else told)


def _common(draining: Draining, said: str) -> str:
    """Defines `within WORDS`, `looked` (sets `seen`), `until_seen yes|no` and `failed WORDS`.

    A command runs in a process group of its own, without input, and is ended when its time is over; a job's variable
    is kept from it, so that what it may leave running is never taken for a part of the job.
    """
    probe = shlex.join(draining.drained)
    limit = steps(draining.deadline_s)
    return f"""
{STAT_SH}
said={shlex.quote(said)}
{{ true >"$said"; }} 2>/dev/null || said=/dev/null
within() {{
  ( unset RATCHET_JOB; exec setsid "$@" </dev/null >>"$said" 2>&1 ) &
  one=$! tries=0
  while stat_of $one && [ "$st_state" != Z ] && [ "$st_state" != X ]; do
    tries=$((tries + 1))
    if [ $tries -gt {limit} ]; then
      kill -KILL "-$one" 2>/dev/null
      echo "ended, since it took more than {draining.deadline_s:g} s" >>"$said"
      return 124
    fi
    nap
  done
  wait $one
}}
# looked: sets `seen` to yes, to no, or to nothing where there is no probe; fails when the probe cannot be run
looked() {{
  seen=
  {"within " + probe if probe else "return 0"}
  code=$?
  case $code in
    0) seen=yes ;;
    124 | 126 | 127) echo "the probe cannot be run (exit $code)" >&2; return 1 ;;
    *) seen=no ;;
  esac
}}
# until_seen yes|no: asks the probe until it says so
until_seen() {{
  read -r began _ </proc/uptime
  while looked; do
    [ -z "$seen" ] || [ "$seen" = "$1" ] && return 0
    read -r up _ </proc/uptime
    [ $((${{up%.*}} - ${{began%.*}})) -ge {max(1, round(draining.deadline_s))} ] && return 1
    sleep 1
  done
  return 1
}}
failed() {{ echo "$1" >&2; tail -n 5 "$said" >&2; exit 1; }}
"""
