"""How a unit of systemd is asked and stopped, as POSIX sh; it never signals a process behind its manager's back."""

from __future__ import annotations

import shlex
from typing import Literal

from state.models import Frozen, Holder, ProcessId
from tools.procfs import STAT_SH
from tools.services.held import known_sh, steps

KILLED_WITHIN_S = 10.0


def manager_sh(holder: Holder) -> str:
    """Defines `mgr WORDS` (systemctl of the right manager), `root COMMAND` (as who may write its units), `prop NAME`.

    A login without a session of its own, as SSH without PAM gives it, is told where its user manager listens.
    """
    if holder.scope == "user":
        begin = 'export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"\nmgr() { systemctl --user "$@"; }'
    elif holder.sudo:
        begin = 'mgr() { sudo -n systemctl --no-ask-password "$@"; }'
    else:
        begin = 'mgr() { systemctl --no-ask-password "$@"; }'
    root = 'root() { sudo -n "$@"; }' if holder.sudo else 'root() { "$@"; }'
    return f"""
{begin}
{root}
unit={shlex.quote(holder.name)}
# prop NAME: one property of the unit
prop() {{ mgr show -p "$1" -- "$unit" | sed "s/^[^=]*=//"; }}
"""


class StopUnit(Frozen):
    """Stop the unit through its manager: its own stop, `grace_s`, then KILL to all that is left of it.

    Fails, and leaves it alone, when its main process is neither the adopted one nor one that we had it start.
    """

    op: Literal["stop-unit"] = "stop-unit"
    root: str
    holder: Holder
    adopted: ProcessId | None
    grace_s: float

    def render(self) -> str:
        """Sh that has nothing to do when the unit does not run."""
        return f"""(
{STAT_SH}{manager_sh(self.holder)}{known_sh(self.root, self.adopted)}
main=$(prop MainPID) || exit 1
[ -n "$main" ] || {{ echo "systemctl tells nothing about $unit" >&2; exit 1; }}
if [ "$main" != 0 ] && stat_of "$main" && ! known "$main"; then
  echo "$unit runs process $main, which is neither adopted nor ours; it was left alone" >&2
  exit 1
fi
# stopped: true when nothing of the unit runs any more
stopped() {{
  case "$(prop ActiveState)" in inactive | failed) [ "$(prop MainPID)" = 0 ] ;; *) false ;; esac
}}
stopped && exit 0
mgr stop --no-block -- "$unit" || exit 1
tries=0
until stopped; do
  tries=$((tries + 1))
  [ $tries -eq {steps(self.grace_s)} ] && mgr kill --kill-who=all --signal=KILL -- "$unit"
  if [ $tries -gt {steps(self.grace_s + KILLED_WITHIN_S)} ]; then
    echo "$unit does not stop: $(prop ActiveState), process $(prop MainPID)" >&2
    exit 1
  fi
  nap
done
)"""
