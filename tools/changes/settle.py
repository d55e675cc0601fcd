"""The one operation that brings a host's asides into the wanted state, as POSIX sh; it runs nothing itself.

Revert, restore, resume and the host's watcher are all this: take back what is not wanted, newest first, then bring what
is wanted into effect, in order. It looks before and after each step, so it can be run again after dying anywhere.
Only one runs at a time: a later one ends an earlier one, and whoever lost the lease finds that out before it begins.
"""

from __future__ import annotations

import json
import shlex
from typing import Literal

from pydantic import Field, TypeAdapter

from state.models import Beside, Frozen, LaunchSpec
from tools.changes.base import planned
from tools.facts.base import decode
from tools.procfs import ENCODE_SH, FAMILY_SH, STAT_SH

PROBE_S, ACT_S = 60, 300
"""How long one script may take; a command that hangs must not keep known-good from coming back."""
STEPS_PER_S = 20
OFF = 1
"""What a probe ends with when nothing of its aside is in effect."""


class SettleAsides(Frozen):
    """Take back every aside but `keep`, then bring those of `due` into effect."""

    op: Literal["settle-asides"] = "settle-asides"
    root: str
    keep: tuple[str, ...] = Field(description="digests of all that the wanted spec has, whenever it is brought about")
    due: tuple[str, ...] = Field(description="digests of those that are brought about now, in order")
    live: bool = Field(description="a server serves: nothing is touched that it must be stopped for")
    epoch: int | None = Field(description="of the lease under which it runs; None: no lease is held")
    tolerant: bool = Field(default=False, description="what cannot be done is said, and the rest goes on")

    def render(self) -> str:
        """Sh that fails when the wanted state was not reached, and says why."""
        keep, due = " ".join(self.keep), " ".join(self.due)
        passed = ":"
        if self.epoch is not None:
            following = shlex.quote(f"{self.root}/lease/epochs/{self.epoch + 1}")
            passed = f'[ ! -e {following} ] || {{ echo "the lease has passed on" >&2; exit 1; }}'
        mine = "live | hot" if self.live else "stopped | live"
        return f"""(
a={shlex.quote(f"{self.root}/asides")}
if [ ! -d "$a" ]; then
  [ -z "{due}" ] || echo "what the configuration needs beside its command line was never made ready" >&2
  [ -z "{due}" ]
  exit
fi
umask 077
{STAT_SH}{FAMILY_SH}{WITHIN_SH}{_SETTLE_SH}
alone || exit 1
{passed}
for aside in $(newest_first); do
  case " {keep} " in *" $aside "*) continue ;; esac
  case "$(cat "$a/$aside/when")" in {mine}) off "$aside" ;; esac
done
for aside in {due}; do on "$aside"; done
rm -f "$a/.settling"
[ -z "$failed" ]{" || :" if self.tolerant else ""}
)"""


class CheckAsides(Frozen):
    """Whether anything that would be changed back or forth was changed by somebody else."""

    root: str
    due: tuple[str, ...]

    def render(self) -> str:
        """Sh that fails and names what is somebody else's."""
        return f"""(
a={shlex.quote(f"{self.root}/asides")}
[ -d "$a" ] || exit 0
{STAT_SH}{FAMILY_SH}{WITHIN_SH}
foreign=
begun=$(for path in "$a"/*/begun; do d=${{path%/begun}}; [ ! -e "$path" ] || echo "${{d##*/}}"; done)
for aside in {" ".join(self.due)} $begun; do
  [ ! -f "$a/$aside/fits" ] || within {PROBE_S} "$a/$aside/fits" || foreign=yes
done
[ -z "$foreign" ]
)"""


class LookAsides(Frozen):
    """Which asides may be in effect, and what the overlays are that were named."""

    root: str
    overlays: tuple[str, ...] = ()

    def render(self) -> str:
        """Sh that prints `aside DIGEST EXIT CHANGES` and `overlay DIGEST CHANGES` for `read_asides`."""
        return f"""
a={shlex.quote(f"{self.root}/asides")} o={shlex.quote(f"{self.root}/overlays")}
{ENCODE_SH}
for one in {" ".join(self.overlays)}; do show "overlay $one" "$o/$one/change.json"; done
[ -d "$a" ] || exit 0
{STAT_SH}{FAMILY_SH}{WITHIN_SH}
for begun in "$a"/*/begun; do
  [ -e "$begun" ] || continue
  d=${{begun%/begun}}
  within {PROBE_S} "$d/probe" 2>/dev/null
  show "aside ${{d##*/}} $?" "$d/change.json"
done
"""


class Seen(Frozen):
    """An aside or an overlay that was found on the host."""

    digest: str
    state: int | None = Field(description="how its probe ended; None for an overlay, which has none")
    changes: tuple[Beside, ...]


CHANGES: TypeAdapter[tuple[Beside, ...]] = TypeAdapter(tuple[Beside, ...])


def read_asides(text: str) -> tuple[Seen, ...]:
    """What `LookAsides` printed. ValueError for a record that is none."""
    found = []
    for line in text.splitlines():
        kind, digest, *rest = line.split()
        changes = CHANGES.validate_python(json.loads(decode(rest[-1]) or b""))
        found.append(Seen(digest=digest, state=int(rest[0]) if kind == "aside" else None, changes=changes))
    return tuple(found)


def before_start(root: str, spec: LaunchSpec, epoch: int | None, tolerant: bool = False) -> SettleAsides:
    """What has to be settled after the old server ended and before the one of `spec` begins."""
    plans = planned(spec)
    due = tuple(plan.digest for plan in plans if plan.when == "stopped")
    keep = tuple(plan.digest for plan in plans)
    return SettleAsides(root=root, keep=keep, due=due, live=False, epoch=epoch, tolerant=tolerant)


def while_serving(root: str, spec: LaunchSpec, epoch: int | None) -> SettleAsides:
    """What has to be settled once a server that was started for `spec` generates."""
    plans = planned(spec)
    due = tuple(plan.digest for plan in plans if plan.when != "stopped")
    return SettleAsides(root=root, keep=tuple(plan.digest for plan in plans), due=due, live=True, epoch=epoch)


def foreign(root: str, spec: LaunchSpec) -> CheckAsides:
    """What has to be asked before a server is stopped for `spec`."""
    return CheckAsides(root=root, due=tuple(plan.digest for plan in planned(spec) if plan.when == "stopped"))


WITHIN_SH = rf"""
# within SECONDS SCRIPT: runs it; its exit code, or 124 when it had to be ended
within() {{
  sh "$2" </dev/null >&2 &
  child=$!
  ticks=-
  stat_of $child && ticks=$st_ticks
  tries=0
  while lives $child "$ticks"; do
    if [ $tries -ge $(($1 * {STEPS_PER_S})) ]; then
      echo "$2 does not end within $1 s" >&2
      family $child
      for row in $found; do lives "${{row%:*}}" "${{row#*:}}" && kill -KILL "${{row%:*}}" 2>/dev/null; done
      wait $child 2>/dev/null
      return 124
    fi
    nap
    tries=$((tries + 1))
  done
  wait $child
}}
"""

_SETTLE_SH = rf"""
failed=
flush() {{ sync "$@" 2>/dev/null || sync; }}
# alone: ends an earlier one that still works, and says that we do now
alone() {{
  stat_of $$ || return 1
  mine="$$ $st_ticks $boot"
  if read -r pid ticks pboot 2>/dev/null <"$a/.settling" && [ "$pid $ticks $pboot" != "$mine" ] &&
    [ "$pboot" = "$boot" ] && lives "$pid" "$ticks"; then
    for again in 1 2; do  # stopped first, so that nothing is begun by those that are about to end
      family "$pid"
      for row in $found; do lives "${{row%:*}}" "${{row#*:}}" && kill -STOP "${{row%:*}}" 2>/dev/null; done
    done
    family "$pid"
    for row in $found; do lives "${{row%:*}}" "${{row#*:}}" && kill -KILL "${{row%:*}}" 2>/dev/null; done
    tries=0
    while remaining && [ $tries -lt {10 * STEPS_PER_S} ]; do nap; tries=$((tries + 1)); done
    if remaining; then echo "an earlier change of the host does not end: $left" >&2; return 1; fi
  fi
  # A full disk must not keep known-good from coming back.
  {{ printf '%s\n' "$mine" >"$a/.settling.$$" && mv -f "$a/.settling.$$" "$a/.settling"; }} 2>/dev/null || :
}}
newest_first() {{
  for order in "$a"/*/order; do
    [ -e "$order" ] || continue
    d=${{order%/order}}
    echo "$(cat "$order") ${{d##*/}}"
  done | sort -rn | while read -r _ name; do echo "$name"; done
}}
state() {{ within {PROBE_S} "$a/$1/probe"; }}
# off DIGEST, on DIGEST: look, act if needed, look again
off() {{
  [ -e "$a/$1/begun" ] || return 0
  state "$1"
  if [ $? -ne {OFF} ]; then
    within {ACT_S} "$a/$1/undo"
    state "$1"
    if [ $? -ne {OFF} ]; then
      echo "not taken back: $(cat "$a/$1/title")" >&2
      failed=yes
      return
    fi
  fi
  rm -f "$a/$1/begun" && flush "$a/$1"
}}
on() {{
  if [ ! -f "$a/$1/do" ]; then
    echo "never made ready: $1" >&2
    failed=yes
    return
  fi
  if [ -e "$a/$1/begun" ] && state "$1"; then return; fi
  if ! : >"$a/$1/begun"; then failed=yes; return; fi
  flush "$a/$1/begun" "$a/$1"
  if state "$1"; then return; fi
  within {ACT_S} "$a/$1/do"
  if ! state "$1"; then
    echo "not in effect: $(cat "$a/$1/title")" >&2
    failed=yes
  fi
}}
"""
