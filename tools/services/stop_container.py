"""How a container engine is asked, and how it stops the server, as POSIX sh; it never removes what was found."""

from __future__ import annotations

import shlex
from typing import Literal

from state.models import Frozen, Holder, ProcessId
from tools.procfs import STAT_SH
from tools.services.held import known_sh

LABEL = "ratchet"
"""Label of the containers that we made; its value is our folder on the host."""


def engine_sh(holder: Holder, root: str) -> str:
    """Defines `eng WORDS` (docker or podman), `root COMMAND`, `main_of ID`, `mine` (ids of ours) and `$original`.

    `RATCHET_JOB` is kept from the engine: what it starts for us must not be taken for a part of the job.
    """
    program = shlex.quote(holder.scope)
    as_root = "sudo -n " if holder.sudo else ""
    return f"""
eng() ( unset RATCHET_JOB; exec {as_root}{program} "$@" )
root() {{ {as_root}"$@"; }}
# main_of ID: the container's main process as the host numbers it, 0 when it does not run
main_of() {{ eng inspect --type container -f '{{{{.State.Pid}}}}' "$1" 2>/dev/null || echo 0; }}
original={shlex.quote(holder.id)}
# mine: a winner of an earlier session may be the original of this one
mine() {{
  listed=$(eng ps -aq --no-trunc --filter {shlex.quote(f"label={LABEL}={root}")}) || return 1
  for one in $listed; do [ "$one" = "$original" ] || echo "$one"; done
}}
"""


class StopContainer(Frozen):
    """Stop the container that was found and those that we made in its place: its stop signal, `grace_s`, then KILL.

    Fails, and leaves it alone, when the container that was found runs a process that is neither adopted nor ours.
    """

    op: Literal["stop-container"] = "stop-container"
    root: str
    holder: Holder
    adopted: ProcessId | None
    grace_s: float

    def render(self) -> str:
        """Sh that has nothing to do when none of them runs."""
        grace = max(1, round(self.grace_s))
        return f"""(
{STAT_SH}{engine_sh(self.holder, self.root)}{known_sh(self.root, self.adopted)}
# family PID: true when it or a child of it (under an init of the engine) is known
family() {{
  known "$1" && return 0
  for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do known "$child" && return 0; done
  return 1
}}
main=$(main_of "$original")
if [ "$main" != 0 ] && stat_of "$main" && ! family "$main"; then
  echo "container $original runs process $main, which is neither adopted nor ours; it was left alone" >&2
  exit 1
fi
ours=$(mine) || exit 1
for one in $original $ours; do
  [ "$(main_of "$one")" = 0 ] || eng stop -t {grace} "$one" >/dev/null || exit 1
  [ "$(main_of "$one")" = 0 ] || {{ echo "container $one does not stop" >&2; exit 1; }}
done
)"""
