"""The script with which the host's watcher puts known-good back: rendered from the operations that the agent runs.

Pure text; nothing is run here. The script looks first: a server that is neither ours nor the adopted one is left
alone (exit 11), and so is a server over files that somebody else changed; a known-good that serves and generates is
left alone but for what is live of it (exit 10). Else it stops what we started, begins known-good and proves it by a
real generation (exit 0); any other exit means that it could not.
"""

from __future__ import annotations

import json
import shlex

from pydantic import Field

from state.models import Frozen, ProcessId
from tools.changes.settle import CheckAsides, SettleAsides
from tools.job_scripts import prepare_script, start_script
from tools.jobs import STARTED_WITHIN_S, job_dir
from tools.manners import MARK as DRAINED
from tools.manners import Undrain
from tools.procfs import LISTENING_SH, STAT_SH
from tools.servers.base import HttpRequest
from tools.servers.probe import probe_source
from tools.services.base import Operation
from tools.services.held import MARK, RECORD, SPEC_MARK

ALREADY, FOREIGN = 10, 11


class Restore(Frozen):
    """What has to serve again, and how that is brought about and proven."""

    root: str
    port: int
    key: str = Field(description="of the launch that the script begins")
    fingerprint: str = Field(description="of known-good, as launches carry it in RATCHET_SPEC")
    adopted: ProcessId | None
    adopted_is_good: bool = Field(description="whether known-good is what the adopted process runs")
    launch_script: str
    operations: tuple[Operation, ...]
    check: CheckAsides | None = Field(default=None, description="fails when files were changed by somebody else")
    live: SettleAsides | None = Field(default=None, description="what is done once known-good generates")
    python: str
    generate: HttpRequest
    deadline_s: float
    undrain: Undrain | None = Field(default=None, description="gives a known-good that generates back to its users")

    def render(self) -> str:
        """The whole script, POSIX sh."""
        size = len(self.launch_script.encode("utf-8", "surrogateescape"))
        place = job_dir(self.root, self.key)
        prepare, begin = prepare_script(place, size), start_script(place, "", size, STARTED_WITHIN_S)
        steps = "\n".join(f"{operation.render()} || exit 1" for operation in self.operations)
        live = ":" if self.live is None else self.live.render()
        foreign = ":" if self.check is None else self.check.render()
        return f"""
{STAT_SH}{LISTENING_SH}{self._who_serves()}{self._generates()}
live() {{ {live}
}}
if [ -n "$good" ] && live && generates 3; then
  {self._given_back()}
  echo "known-good serves as process $good and generates"
  exit {ALREADY}
fi
# Over a file that somebody else changed nothing is restored while anything serves.
{foreign} || [ -z "$inodes" ] || {{ echo "the server was left alone"; {self._still_drained()}; exit {FOREIGN}; }}
printf %s {shlex.quote(self.launch_script)} | ( {prepare} ) || exit 1
{steps}
printf %s {shlex.quote(self.launch_script)} | ( {begin} ) || exit 1
generates {max(1, int(self.deadline_s))} || {{ echo "known-good was started but does not generate"; exit 1; }}
live || {{ echo "known-good was started, but not everything that is live of it is in effect"; exit 1; }}
{self._given_back()}
echo "known-good serves as launch {self.key} and generates"
"""

    def _given_back(self) -> str:
        """Ends a drain of ours; what cannot be given back is said, and tried again by the next agent."""
        if self.undrain is None:
            return ":"
        said = f"the server is still drained, which failed to end: {shlex.join(self.undrain.draining.undrain)}"
        return f"{self.undrain.render()} || echo {shlex.quote(said)}"

    def _still_drained(self) -> str:
        """Says that a server which is left alone is out of its users' way by our doing."""
        if self.undrain is None:
            return ":"
        mark = shlex.quote(f"{self.root}/{DRAINED}")
        said = f"the server is still drained by us; to put it back: {shlex.join(self.undrain.draining.undrain)}"
        return f"[ ! -e {mark} ] || echo {shlex.quote(said)}"

    def _who_serves(self) -> str:
        """Sets `good` to the process on the port if that is known-good; exits FOREIGN for somebody else's."""
        adopted, is_good = "false", ":"
        jobs = shlex.quote(f"{self.root}/jobs")
        if self.adopted is not None:
            one = self.adopted
            adopted = (
                f'[ "$pid $boot" = {shlex.quote(f"{one.pid} {one.boot_id}")} ] && lives {one.pid} {one.start_ticks}'
            )
            is_good = "good=$pid" if self.adopted_is_good else ":"
        return f"""
inodes=$(listening {self.port:04X} | cut -d ' ' -f 2)
good=
for inode in $inodes; do
  holders=$(LC_ALL=C ls -l /proc/[0-9]*/fd 2>/dev/null |
    grep -e '^/proc/[0-9]*/fd:' -e "socket:\\[$inode\\]" | grep -B 1 -e "socket:\\[$inode\\]" |
    sed -n 's|^/proc/\\([0-9]*\\)/fd:.*|\\1|p')
  for pid in $holders; do
    marks=$(tr '\\0' '\\n' <"/proc/$pid/environ" 2>/dev/null |
      grep -e '^RATCHET_JOB=' -e '^{MARK}=' -e '^{SPEC_MARK}=')
    record=
    stat_of "$pid" && record=$(cat {jobs}/*/{RECORD} 2>/dev/null | grep "^$pid $st_ticks $boot ")
    [ -z "$record" ] || marks="RATCHET_JOB={self.root}/jobs/ {SPEC_MARK}=${{record##* }}"
    case "$marks" in
      *RATCHET_JOB={jobs}/* | *{MARK}={jobs}/*)
        case "$marks" in *{SPEC_MARK}={self.fingerprint}*) good=$pid ;; esac ;;
      *)
        if {adopted}; then {is_good}
        else {self._still_drained()}
          echo "process $pid on port {self.port} is not ours and was left alone"; exit {FOREIGN}
        fi ;;
    esac
  done
done
"""

    def _generates(self) -> str:
        """`generates SECONDS`: true as soon as a real completion with a token came back, or a declared check held."""
        asked = json.dumps([self.generate.model_dump()])
        probe = shlex.join([self.python, "-c", probe_source(), f"{self.generate.timeout_s:g}"])
        tokens = "*completion_tokens???[1-9]* | *completion_tokens????[1-9]*"
        proof = """*'"status": 2'[0-9][0-9]*""" if self.generate.proof == "answer" else tokens
        return f"""
generates() {{
  read -r began _ </proc/uptime
  while :; do
    answer=$(printf %s {shlex.quote(asked)} | {probe} 2>&1)
    case "$answer" in {proof}) return 0 ;; esac
    read -r up _ </proc/uptime
    [ $((${{up%.*}} - ${{began%.*}})) -ge "$1" ] && {{ echo "last answer: $answer" | tail -c 400; return 1; }}
    nap
  done
}}
"""
