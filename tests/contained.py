"""A part of this machine that can't harm the rest: a PID, mount, cgroup, UTS and IPC namespace, read-only but for one
folder. For service managers and container engines, which write outside any folder that they are given.

Nothing is run in it before writing outside the folder was tried and refused. When its first process ends, the kernel
ends all others in it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local_host import LocalHost
from tools.shell import CommandResult, PosixHost, quote

CGROUPS = Path("/sys/fs/cgroup/unified")
DROPPED = ("sys_time", "sys_module", "sys_boot", "sys_rawio", "net_admin", "syslog", "wake_alarm")
"""Capabilities over things that no namespace keeps apart, the clock above all: neither the first process nor any script
has them."""
BOUNDED = [f"--{kind}={','.join(f'-{name}' for name in DROPPED)}" for kind in ("bounding-set", "inh-caps")]
WORLD_SH = r"""
set -e
world=$1 seen=$2; shift 2
mount --make-rprivate /
if [ -n "$seen" ]; then
  mount -t tmpfs none /mnt
  mkdir /mnt/seen
  mount --rbind "$seen" /mnt/seen
fi
for d in /tmp /var/tmp /run /root /home /mnt /dev/shm /var/log /var/cache /var/lib/containers /etc/cni/net.d \
  /etc/systemd /usr/lib/systemd/system-generators /usr/lib/systemd/user-generators \
  /usr/lib/systemd/system-environment-generators /usr/lib/systemd/user-environment-generators; do
  [ ! -d $d ] || case "$world/" in $d/*) ;; *) [ $d = /mnt ] || mount -t tmpfs none $d ;; esac
done
if [ -n "$seen" ]; then
  mkdir -p "$seen"
  mount --rbind /mnt/seen "$seen"
  mount -o remount,bind,ro "$seen"
fi
mount -t tmpfs none /mnt
umount -R /sys/fs/cgroup 2>/dev/null || :
mount -t cgroup2 none /sys/fs/cgroup
for d in /dev /sys /proc/sys; do mount --rbind $d $d; mount -o remount,bind,ro $d; done
mount --bind "$world" "$world"
mount -o remount,bind,ro /
for f in / /usr /etc /var /root/.. /dev /proc/sys /sys "$world/.." $seen; do
  if ( : >"$f/.written" ) 2>/dev/null; then echo "$f can be written" >&2; exit 1; fi
done
: >"$world/contained"
exec "$@"
"""
"""`--rbind` takes the submounts along; they were made private before, and only the top is made read-only."""


def entering(pid: int) -> list[str]:
    """Words before a command that is to run in the namespaces of that process."""
    return ["nsenter", "-t", str(pid), "-m", "-p", "-C", "-u", "-i", "setpriv", *BOUNDED]


class ContainedHost(PosixHost):
    """That part as a host: each script runs in its namespaces."""

    def __init__(self, pid: int, lines: str) -> None:
        self.pid, self.lines, self.name, self.outside = pid, lines, "contained", LocalHost()

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        shell = f"exec {quote([*entering(self.pid), '/bin/sh', '-c', self.lines + script])}"
        return await self.outside.run(shell, stdin=stdin, timeout_s=timeout_s)

    async def close(self) -> None:
        """Nothing is held open."""


@contextlib.contextmanager
def contained(world: Path, *first: str, environ: dict[str, str], seen: str = "") -> Iterator[int]:
    """The pid, as seen from here, of `first` as process 1 of such a part; skips where none can be made.

    `seen` is a folder below a hidden one, such as /root, that may be read all the same.
    """
    world.mkdir(parents=True, exist_ok=True)
    if not os.environ.get("RATCHET_CONTAINED"):
        pytest.skip("real service managers start only where RATCHET_CONTAINED=1 says that they may")
    if os.geteuid() != 0 or not CGROUPS.is_dir():
        pytest.skip("only root of a machine with a cgroup2 tree of its own can make such namespaces")
    group = CGROUPS / f"ratchet-test-{os.getpid()}"
    group.mkdir()
    enter = f'echo $$ >{group}/cgroup.procs && exec "$0" "$@"'
    flags = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--cgroup", "--uts", "--ipc"]
    command = [
        "/bin/sh",
        "-c",
        enter,
        *flags,
        "/bin/sh",
        "-c",
        WORLD_SH,
        "sh",
        str(world),
        seen,
        "setpriv",
        *BOUNDED,
        *first,
    ]
    with (world.parent / "first.log").open("wb") as log:
        outer = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield _first_process(outer, world)
    finally:
        outer.kill()
        outer.wait()
        _remove(group)


def _first_process(outer: subprocess.Popen[bytes], world: Path) -> int:
    for _ in range(200):
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        if (world / "contained").exists() and (pids := children.read_text().split()):
            return int(pids[0])
        if outer.poll() is not None:
            break
        time.sleep(0.05)
    pytest.skip(f"no contained part could be made: {(world.parent / 'first.log').read_text()[-300:]}")


def _remove(group: Path) -> None:
    """The cgroup that was made, once the kernel has ended all that ran in it."""
    for _ in range(200):
        folders = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        with contextlib.suppress(OSError):
            for path in (*folders, group):
                path.rmdir()
            return
        time.sleep(0.05)
