"""Memory given back after a stop: a launch notes what is free when it begins, the next one waits for that level.

An engine's workers can hold memory, on GPUs above all, for long after the port is free; a launch into that fails for a
reason that is not its own. Pure text, like all operations. A level that never comes back does not stop a launch, since
somebody else may rightly have the memory now: it is said, and stands in the log beside the launch.
"""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import Field

from state.models import Frozen

LOOKS_PER_S = 2
GPU_PATIENCE_S = 20
"""A driver in trouble lets nvidia-smi hang."""

LOOK_SH = f"""
# level: what is free now, one `host MB` and one `gpu INDEX USED_MB` line for each GPU that can be seen
level() {{
  while read -r name kb _; do [ "$name" = MemAvailable: ] && echo "host $((kb / 1024))"; done </proc/meminfo
  command -v nvidia-smi >/dev/null 2>&1 || return 0
  timeout {GPU_PATIENCE_S} nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits 2>/dev/null |
    while IFS=', ' read -r index used _; do echo "gpu $index $used"; done
}}
"""

NOTE_LEVEL_SH = LOOK_SH + 'level >"$RATCHET_JOB/level.part" && mv -f "$RATCHET_JOB/level.part" "$RATCHET_JOB/level"\n'
"""Part of a launch, run when the server before it is gone and its own has not begun."""


class AwaitMemory(Frozen):
    """Wait until host and GPUs have as much free memory as before the launch that was stopped last."""

    op: Literal["await-memory"] = "await-memory"
    root: str
    but: str = Field(description="key of the launch that is about to begin")
    within_s: float
    host_slack_mb: int = Field(default=512, description="missing memory that is nobody's fault")
    gpu_slack_mb: int = 256

    def render(self) -> str:
        """Sh that always succeeds; it prints a line when memory is missing in the end, or cannot be observed."""
        return f"""(
{LOOK_SH}
before=
for one in {shlex.quote(self.root)}/jobs/*-T*/level; do
  [ -f "$one" ] || continue
  case "$one" in */{shlex.quote(self.but)}/level) continue ;; esac
  if [ -z "$before" ] || [ "$one" -nt "$before" ]; then before=$one; fi
done
if [ -z "$before" ]; then
  echo "memory before the adopted server is not known, so its return cannot be observed"
  exit 0
fi
# missing: what is held beyond the level before, in words
missing() {{
  now=$(level)
  while read -r kind one two; do
    case $kind in
      host)
        set -- $(echo "$now" | grep '^host ')
        [ $((one - ${{2:-0}})) -le {self.host_slack_mb} ] || echo "$((one - ${{2:-0}})) MB of host memory" ;;
      gpu)
        set -- $(echo "$now" | grep "^gpu $one ")
        if [ -z "${{3:-}}" ]; then echo "GPU $one, which cannot be observed any more"
        elif [ $(($3 - two)) -gt {self.gpu_slack_mb} ]; then echo "$(($3 - two)) MB of GPU $one"
        fi ;;
    esac
  done <"$before"
}}
looks=0
while held=$(missing) && [ -n "$held" ]; do
  looks=$((looks + 1))
  if [ $looks -gt {max(1, int(self.within_s * LOOKS_PER_S))} ]; then
    echo "memory is not back to its level before: $(echo "$held" | tr '\\n' ';')"
    exit 0
  fi
  sleep 0.5 2>/dev/null || sleep 1
done
)"""
