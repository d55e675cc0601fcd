"""The dead man's switch on the host: a lease that the agent renews, and a watcher that restores when renewals stop.

Only the host's clock counts: a renewal writes the host's uptime, the watcher (POSIX sh, detached, nothing installed)
compares. When the last renewal is older than the lease, the watcher opens the next epoch, which fences every later
command of the old agent, runs the restore script and leaves a marker. What known-good is, is not known here: the
restore script is rendered elsewhere from the same operations that the agent itself runs.

    ROOT/lease/epochs/N     one file an epoch, put there by `ln`, which only one taker can win: the holder in words,
                            when it was taken, the lease's length in s, the boot it belongs to
               beat-N       uptime of the host at the last renewal    done-N     the epoch ended in good order
               restore.sh   puts known-good back                      marker-N   what the watcher of epoch N-1 did
               ballast      removed by the watcher first, so that a full disk does not keep known-good from starting
"""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import Field

from state.errors import CommandFailed, LeasePassedOn, TargetLocked
from state.models import Frozen
from tools import jobs
from tools.procfs import STAT_SH
from tools.shell import CommandResult, Host, PosixHost

FENCED = 75
"""Exit of a command whose epoch is over (EX_TEMPFAIL of sysexits.h)."""
HELD = 76
"""Exit of an attempt to take a lease that is being renewed."""
WATCHER = "the watcher on the host"
POLL_S = 1
BALLAST_BYTES = 4 << 20
"""What the watcher frees before it restores, for the launch's files and the first lines of the server's log."""
LONG_AGO = -1_000_000_000
"""An uptime in s that makes any lease run out."""


class Lease(Frozen):
    """An epoch that we hold."""

    root: str
    epoch: int
    length_s: int

    @property
    def folder(self) -> str:
        """Where everything about leases lies."""
        return f"{self.root}/lease"

    @property
    def watcher_key(self) -> str:
        """Key of the job that watches this epoch."""
        return f"watcher-{self.epoch}"


class Marker(Frozen):
    """What a watcher left behind when it took over."""

    epoch: int = Field(description="the epoch that it opened")
    result: Literal["restored", "already serving", "foreign", "failed"]
    detail: str


class FencedHost(PosixHost):
    """A host on which a script runs only while our epoch is in force, checked in the same breath.

    Everything that changes the host goes through here, so that an agent that wakes up late is refused by the host.
    """

    def __init__(self, host: Host, lease: Lease) -> None:
        self.host = host
        self.lease = lease
        self.name = host.name

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """See `Host.run`. Raises LeasePassedOn when another epoch is in force."""
        result = await self.host.run(fence(self.lease) + script, stdin=stdin, timeout_s=timeout_s)
        if result.exit == FENCED and result.signal is None:
            raise LeasePassedOn(
                "the lease on the target has passed on: the host's watcher or another agent took over",
                where={"host": self.name, "our epoch": self.lease.epoch, "now": result.tail},
                do="`resume` looks at what was done meanwhile and goes on from there",
            )
        return result

    async def close(self) -> None:
        """The connection belongs to somebody else."""


def fence(lease: Lease) -> str:
    """Sh that ends with FENCED unless our epoch is the newest; it goes in front of every mutating command."""
    following = shlex.quote(f"{lease.folder}/epochs/{lease.epoch + 1}")
    ours = shlex.quote(f"{lease.folder}/epochs/{lease.epoch}")
    return f"[ -e {ours} ] && [ ! -e {following} ] || {{ head -n 1 {following} >&2; exit {FENCED}; }}\n"


async def refuse_held(host: Host, root: str) -> None:
    """Look whether somebody holds the target, and take nothing. Raises TargetLocked."""
    result = await host.run(f"{_held_sh(root, None)}\nrefuse_held", timeout_s=60)
    if result.exit == HELD:
        raise _locked(host, result)


async def take(host: Host, root: str, holder: str, length_s: int, predecessor: str | None = None) -> Lease:
    """Open the next epoch. Raises TargetLocked while another holder renews its own.

    `predecessor` begins the names of all holders that the caller knows to be dead (it holds their database lock).
    """
    result = await host.run(_take_script(root, holder, length_s, predecessor), timeout_s=60)
    if result.exit == HELD:
        raise _locked(host, result)
    if not result.ok:
        raise CommandFailed(
            "the lease on the target could not be taken",
            where={"host": host.name, "directory": f"{root}/lease", "ended": result.ending},
            tail=result.tail,
            do="check that the directory is writable for this user and that the disk is not full",
        )
    return Lease(root=root, epoch=int(result.text.split()[-1]), length_s=length_s)


def _locked(host: Host, refused: CommandResult) -> TargetLocked:
    return TargetLocked(
        "another agent holds this target",
        where={"host": host.name, "held by": refused.tail},
        do="let it finish, or `stop` it; the lease of a dead agent runs out by itself",
    )


async def watch(fenced: FencedHost, restore_script: str | None) -> None:
    """Put the restore script in place (None: leave it) and see that a watcher of this epoch lives.

    A watcher that was killed is followed by another one under a new key; the old one's key never runs again.
    """
    lease = fenced.lease
    if restore_script is not None:
        await fenced.check(_ballast_script(lease))
        await fenced.put(f"{lease.folder}/restore.sh", restore_script.encode("utf-8", "surrogateescape"))
    key = lease.watcher_key
    for again in range(1, 100):
        if not (await jobs.look(fenced, lease.root, key)).over:
            break
        key = f"{lease.watcher_key}-{again}"
    await jobs.start(fenced, lease.root, key, watcher_script(lease))


async def renew(fenced: FencedHost) -> bool:
    """Renew the lease; False when its watcher does not live (any more). Raises LeasePassedOn."""
    lease = fenced.lease
    watchers = shlex.quote(jobs.job_dir(lease.root, lease.watcher_key))
    result = await fenced.check(
        f"{STAT_SH}{_beat(lease)}\n"
        f"for f in {watchers}/process {watchers}-*/process; do\n"
        '  read -r pid ticks pboot <"$f" && [ "$pboot" = "$boot" ] && lives "$pid" "$ticks" && echo watched\n'
        "done 2>/dev/null; :"
    )
    return "watched" in result.text


async def hand_over(fenced: FencedHost) -> None:
    """Let the lease run out now: the watcher takes over within its next look, as if we had been silent for long."""
    beat = shlex.quote(f"{fenced.lease.folder}/beat-{fenced.lease.epoch}")
    await fenced.check(f"echo {LONG_AGO:d} 1<>{beat}")


async def release(fenced: FencedHost) -> None:
    """End the epoch in good order: its watcher leaves, and anybody may take the next one."""
    lease = fenced.lease
    await fenced.check(f": >{shlex.quote(f'{lease.folder}/done-{lease.epoch}')}")
    for key in (lease.watcher_key, *(f"{lease.watcher_key}-{again}" for again in range(1, 100))):
        if (await jobs.stop(fenced, lease.root, key, 2.0)).phase == "absent":
            break


async def marker(host: Host, root: str, holder: str = "") -> Marker | None:
    """The newest marker since a holder whose name begins like `holder` first held the target, None without one."""
    folder = shlex.quote(f"{root}/lease")
    result = await host.check(f"""
newest=0 first=0
for f in {folder}/marker-*; do n=${{f##*-}}; [ -e "$f" ] && [ $n -gt $newest ] && newest=$n; done
for f in {folder}/epochs/*; do
  n=${{f##*/}} who=
  read -r who 2>/dev/null <"$f"
  case "$who" in {shlex.quote(holder)}*) [ $first -gt 0 ] && [ $first -lt "$n" ] || first=$n ;; esac
done
[ $first -gt 0 ] && [ $newest -gt $first ] && echo $newest && cat {folder}/marker-$newest
:""")
    lines = result.text.splitlines()
    if len(lines) < 2:
        return None
    return Marker.model_validate({"epoch": int(lines[0]), "result": lines[1], "detail": "\n".join(lines[2:])})


def watcher_script(lease: Lease) -> str:
    """The watcher: waits for the end of renewals or of the epoch; fires at most once, and never while they arrive."""
    folder, epoch = shlex.quote(lease.folder), lease.epoch
    return f"""
{STAT_SH}
l={folder}
while :; do
  [ -e "$l/epochs/{epoch + 1}" ] && exit 0
  [ -e "$l/done-{epoch}" ] && exit 0
  beat=0
  read -r beat <"$l/beat-{epoch}" 2>/dev/null
  read -r up _ </proc/uptime
  [ $((${{up%.*}} - ${{beat%.*}})) -ge {lease.length_s} ] && break
  sleep {POLL_S}
done
rm -f "$l/ballast"
printf '%s\\n' {shlex.quote(WATCHER)} "$(date -u '+%F %T UTC')" {lease.length_s} "$boot" >"$l/.watcher-{epoch}"
ln "$l/.watcher-{epoch}" "$l/epochs/{epoch + 1}" 2>/dev/null
taken=$?
rm -f "$l/.watcher-{epoch}"
[ $taken -eq 0 ] || exit 0
sh "$l/restore.sh" >"$l/restore-{epoch + 1}.log" 2>&1
code=$?
case $code in
  0) word=restored ;;
  10) word="already serving" ;;
  11) word=foreign ;;
  *) word=failed ;;
esac
{{ echo "$word"; tail -n 5 "$l/restore-{epoch + 1}.log"; }} >"$l/marker.part"
mv -f "$l/marker.part" "$l/marker-{epoch + 1}"
: >"$l/done-{epoch + 1}"
"""


def _ballast_script(lease: Lease) -> str:
    """Sh that sees that there is something to throw overboard when known-good must start on a full disk."""
    ballast = shlex.quote(f"{lease.folder}/ballast")
    return f"""
umask 077
[ -s {ballast} ] && exit 0
head -c {BALLAST_BYTES} /dev/urandom >{ballast}.part && mv -f {ballast}.part {ballast} && exit 0
rm -f {ballast}.part
exit 1
"""


def _beat(lease: Lease) -> str:
    beat = shlex.quote(f"{lease.folder}/beat-{lease.epoch}")
    # In place, one short line over another: a disk that is full by now must not make us fall silent.
    return f'read -r up _ </proc/uptime && echo "$up" 1<>{beat} || exit 1'


def _held_sh(root: str, predecessor: str | None) -> str:
    """Sh that sets `l` and defines `refuse_held`: it sets `epoch`, and exits HELD, naming who holds it."""
    dead = "" if predecessor is None else f'case "$who" in {shlex.quote(predecessor)}*) dead=yes ;; esac'
    return f"""
{STAT_SH}
l={shlex.quote(f"{root}/lease")}
refuse_held() {{
  epoch=0
  for f in "$l"/epochs/*; do n=${{f##*/}}; [ -e "$f" ] && [ "$n" -gt $epoch ] && epoch=$n; done
  [ $epoch -gt 0 ] && [ ! -e "$l/done-$epoch" ] || return 0
  {{ read -r who; read -r since; read -r length; read -r taken_in; }} <"$l/epochs/$epoch"
  beat=0
  read -r beat 2>/dev/null <"$l/beat-$epoch"
  read -r up _ </proc/uptime
  age=$((${{up%.*}} - ${{beat%.*}}))
  dead=
  {dead}
  [ "$taken_in" = "$boot" ] && [ -z "$dead" ] || return 0
  # A watcher is at work for as long as its job lives; an agent for as long as it renews.
  working=
  if [ "$who" = {shlex.quote(WATCHER)} ]; then
    for f in "{root}/jobs/watcher-$((epoch - 1))/process" "{root}/jobs/watcher-$((epoch - 1))"-*/process; do
      read -r pid ticks pboot <"$f" && [ "$pboot" = "$boot" ] && lives "$pid" "$ticks" && working=yes
    done 2>/dev/null
  elif [ $age -lt "$length" ]; then working=yes
  fi
  if [ -n "$working" ]; then echo "$who, since $since, renewed $age s ago" >&2; exit {HELD}; fi
}}
"""


def _take_script(root: str, holder: str, length_s: int, predecessor: str | None) -> str:
    """Sh that prints the new epoch's number; exits HELD, naming the holder, while somebody renews."""
    return f"""{_held_sh(root, predecessor)}
umask 077
mkdir -p "$l/epochs" || exit 1
while :; do
  refuse_held
  epoch=$((epoch + 1))
  printf '%s\\n' {shlex.quote(holder)} "$(date -u '+%F %T UTC')" {length_s} "$boot" >"$l/.taker-$$" || exit 1
  read -r up _ </proc/uptime
  # Renamed into place: another taker may be reading the file of the same epoch, and must not find it empty.
  echo "$up" >"$l/.beat-$$" && mv -f "$l/.beat-$$" "$l/beat-$epoch" || exit 1
  if ln "$l/.taker-$$" "$l/epochs/$epoch" 2>/dev/null; then rm -f "$l/.taker-$$"; echo "$epoch"; exit 0; fi
  rm -f "$l/.taker-$$"
  [ -e "$l/epochs/$epoch" ] || {{ echo "the file system of $l knows no hard links" >&2; exit 1; }}
done
"""
