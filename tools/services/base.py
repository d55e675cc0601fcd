"""How a server is held on its host: the seam of services, and the operations that a plan is made of.

A plan is data: what has to be done to get from what is observed to what is desired. Each operation renders itself as
POSIX sh, so that the agent can run it over SSH and a script left on the host can run the very same thing. Nothing
here runs anything.
"""

from __future__ import annotations

import shlex
from typing import Literal, Protocol

from pydantic import Field

from state.models import Frozen, LaunchSpec, ProcessId
from tools.changes.settle import SettleAsides
from tools.job_scripts import stop_body
from tools.procfs import FAMILY_SH, LISTENING_SH, STAT_SH
from tools.services.memory import AwaitMemory
from tools.services.stop_container import StopContainer
from tools.services.stop_unit import StopUnit

STEPS_PER_S = 20


class StopJobs(Frozen):
    """End every job of ours whose key has this shape and that has not ended, with everything it started.

    Of whatever session: no launch may be left beside a new one. Which ones there are is seen when it runs, so that the
    same operation serves the agent now and the watcher later.
    """

    op: Literal["stop-jobs"] = "stop-jobs"
    root: str
    shape: Literal["*-T*", "*-M*"] = Field(description="launches or benchmark runs")
    but: str = Field(default="", description="key of one that may go on")
    grace_s: float

    def render(self) -> str:
        """Sh that fails and names whoever is left."""
        return f"""(
for one in {shlex.quote(self.root)}/jobs/{self.shape}; do
  [ -d "$one/begun" ] && [ ! -f "$one/exit" ] && [ "${{one##*/}}" != {shlex.quote(self.but)} ] || continue
  ( d=$one
{stop_body(self.grace_s)}
  ) >/dev/null || exit 1
done
)"""


class StopAdopted(Frozen):
    """End the adopted server and its descendants: TERM, wait, KILL; nothing when it is gone or another process."""

    op: Literal["stop-adopted"] = "stop-adopted"
    process: ProcessId
    grace_s: float

    def render(self) -> str:
        """Sh that signals only after the start time and the boot were compared in the same breath."""
        steps = max(1, int(self.grace_s * STEPS_PER_S))
        return f"""(
{STAT_SH}{FAMILY_SH}
pid={self.process.pid} ticks={self.process.start_ticks}
[ "$boot" = {shlex.quote(self.process.boot_id)} ] && lives $pid $ticks || exit 0
family $pid
lives $pid $ticks && kill -TERM $pid
tries=0
while lives $pid $ticks && [ $tries -lt {steps} ]; do nap; tries=$((tries + 1)); done
tries=0
while remaining && [ $tries -lt {5 * STEPS_PER_S} ]; do
  # Children get a second to follow their parent; a parent that ignored TERM gets none.
  if [ $tries -ge {STEPS_PER_S} ] || lives $pid $ticks; then
    for row in $left; do lives "${{row%:*}}" "${{row#*:}}" && kill -KILL "${{row%:*}}" 2>/dev/null; done
  fi
  nap
  tries=$((tries + 1))
done
if remaining; then echo "still there after KILL: $left" >&2; exit 1; fi
)"""


class AwaitPortFree(Frozen):
    """Wait until nobody listens on the port; a start right after a kill would fail to bind."""

    op: Literal["await-port-free"] = "await-port-free"
    port: int
    within_s: float

    def render(self) -> str:
        """Sh that reads procfs, since no other tool is sure to be there."""
        steps = max(1, int(self.within_s * STEPS_PER_S))
        return f"""(
{LISTENING_SH}
tries=0
while [ -n "$(listening {self.port:04X})" ]; do
  tries=$((tries + 1))
  if [ $tries -gt {steps} ]; then echo "port {self.port} is still taken" >&2; exit 1; fi
  sleep 0.05 2>/dev/null || sleep 1
done
)"""


Operation = StopJobs | StopAdopted | StopUnit | StopContainer | AwaitPortFree | AwaitMemory | SettleAsides


class Service(Protocol):
    """A way of holding a server process."""

    def plan(self, adopted: ProcessId | None, key: str) -> tuple[Operation, ...]:
        """What must be done before a server may begin as launch `key`; `adopted` is the process that was adopted."""
        ...

    def launch_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str:
        """The sh text that becomes the server; `secrets` are values by placeholder. Raises ServerError for a gap."""
        ...

    def lasting(self, desired: LaunchSpec) -> str:
        """What a person types so that the server comes back like this after a reboot; no secret is in it."""
        ...

    def persist_script(self, desired: LaunchSpec, secrets: dict[str, str], key: str) -> str | None:
        """Sh that makes whoever starts the server at a reboot start `desired`, which serves as launch `key`.

        It prints what was done, and restarts nothing. None where nobody starts the server.
        """
        ...

    def unpersist_script(self, session_id: str) -> str | None:
        """Sh that takes back what `persist_script` did in a session, if it did; None where it never does anything."""
        ...
