"""What a round stands on: a rig, a wire, and where a fault needs them a namespace, small disks and a clock of its own.

Everything is made inside one folder and unmade when the block ends, however it ends. The real clock, the machine's own
network and its disks are never touched. Only processes started here or by the rig are signalled.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.link import Link
from tests.e2e.rig import FASTER, PROJECT, Rig, rig
from tests.e2e.witness import start_ticks
from tests.ssh_servers import SSHD, await_port, comm, descendants, free_port

LEASE_S = 15
DISK_MB = 400
"""More than a session is refused without, and quickly filled."""
FILLER = "filler-of-the-disk"
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

REQUEST_DEADLINE_S, RUN_DEADLINE_S = 12, 24
EXPERIMENTS = (
    FASTER
    + """
[[experiments]]
id = "refused"
title = "Values in 8 bits without flash attention"
hypothesis = "the server refuses to start like this"
changes = [{ kind = "flag", name = "--cache-type-v", value = "q8_0" }]
priority = 0.5

[[experiments]]
id = "slower"
title = "Hardly any polling, one token at a time"
hypothesis = "a loss or nothing"
changes = [
    { kind = "flag", name = "--ubatch-size", value = "2" },
    { kind = "flag", name = "--poll", value = "0" },
]
priority = 0.1
"""
)


def lacking(need: str) -> str | None:
    """Why this machine cannot give what a fault needs, None when it can."""
    if need == "clock":
        return None if FAKETIME else "libfaketime is not installed"
    if os.getuid() != 0:
        return "only root may mount and make network namespaces"
    if need == "network":
        missing = [tool for tool in ("ip", "nft", "unshare", "nsenter") if shutil.which(tool) is None]
        return f"not installed: {', '.join(missing)}" if missing else None
    return None


class Network:
    """A network namespace for agents, joined to ours by a veth pair; it is gone with the process that holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.within = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")
        self.outer = f"chaos{self._holder.pid}"
        net = f"10.213.{random.randrange(256)}"
        self.address = f"{net}.1"
        try:
            self._await_namespace()
            inner = f"{self.outer}i"
            ip("link", "add", self.outer, "type", "veth", "peer", "name", inner, "netns", str(self._holder.pid))
            ip("addr", "add", f"{self.address}/30", "dev", self.outer)
            ip("link", "set", self.outer, "up")
            ip("addr", "add", f"{net}.2/30", "dev", inner, within=self.within)
            ip("link", "set", inner, "up", within=self.within)
        except BaseException:
            self.close()
            raise

    def lose(self, percent: int) -> None:
        """Drop so many of a hundred packets, in both directions."""
        drop = f"numgen random mod 100 < {percent} drop"
        chains = "".join(
            f"chain {hook} {{\n type filter hook {hook} priority 0;\n {drop}\n}}\n" for hook in ("input", "output")
        )
        rules = f"table inet chaos {{\n{chains}}}\n"
        subprocess.run([*self.within, "nft", "-f", "-"], input=rules, text=True, check=True)

    def close(self) -> None:
        """End the holder; the kernel takes the namespace and both ends of the pair away once no agent is in it."""
        if self._holder.stdin is not None:
            self._holder.stdin.close()
        self._holder.wait(10)
        subprocess.run(["ip", "link", "del", self.outer], stderr=subprocess.DEVNULL, check=False)

    def _await_namespace(self) -> None:
        """Until the holder has left our namespace."""
        ours, its = os.readlink("/proc/self/ns/net"), f"/proc/{self._holder.pid}/ns/net"
        while os.readlink(its) == ours:
            if self._holder.poll() is not None:
                raise RuntimeError("no network namespace can be made here")


def ip(*words: str, within: tuple[str, ...] = ()) -> None:
    """Run the tool of that name; what it complains about becomes part of the error."""
    done = subprocess.run([*within, "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Disk:
    """A small file system in a folder, that can be filled to the last byte and emptied again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, mode=0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "chaos", folder], check=True)

    def fill(self) -> None:
        """Leave no byte free, nor any that is freed just then."""
        with (self.folder / FILLER).open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 20))
        for size in (1 << 16, 1 << 12):
            with (self.folder / FILLER).open("ab", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))

    def empty(self) -> None:
        """Give the space back."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount, and leave what was there in the folder itself."""
        self.empty()
        saved = self.folder.with_name(f"{self.folder.name}-saved")
        shutil.copytree(self.folder, saved, symlinks=True)
        subprocess.run(["umount", "--lazy", self.folder], check=True)
        self.folder.rmdir()
        saved.rename(self.folder)


class Ground:
    """The host, its server, and everything that can be done to them."""

    def __init__(
        self, host: Rig, link: Link, network: Network | None, disks: dict[str, Disk], experiments: str
    ) -> None:
        self.host, self.link, self.network, self.disks = host, link, network, disks
        self.clock = host.folder / "clock-of-agents"
        self.clock.write_text("+0")
        self.session = self._session(experiments)
        self.bystanders = [self._bystander("llama_server.py"), self._bystander("stream_client.py")]

    def fake_clock(self) -> None:
        """From here on agents read their wall clock through a file; durations stay true."""
        self.host.around_agents |= {
            "LD_PRELOAD": str(FAKETIME[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set_clock(self, ahead_s: int) -> None:
        """Let the agents' clock be wrong by so much."""
        part = self.clock.with_suffix(".part")
        part.write_text(f"{ahead_s:+d}")
        part.replace(self.clock)

    def kill_sshd(self) -> None:
        """SIGKILL what serves each connection, and the listener."""
        sshd = self.host.sshd
        serving = [pid for pid in descendants(sshd.process.pid) if comm(pid).startswith("sshd")]
        sshd.process.kill()
        sshd.process.wait()
        for pid in serving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_sshd(self) -> None:
        """The same sshd again, on the same port."""
        sshd = self.host.sshd
        if sshd.process.poll() is None:
            return
        with (sshd.folder / "log").open("ab") as log:
            sshd.process = subprocess.Popen([SSHD, "-D", "-e", "-f", sshd.folder / "sshd_config"], stderr=log)
        await_port(sshd.direct_port, sshd.process, sshd.folder / "log")

    def signal_server(self, number: int) -> str:
        """Signal whoever serves, if it is a process of this rig; what was done, in words."""
        pid = self.host.listener()
        if pid is None or pid not in self.host.ours():
            return "nobody served"
        os.kill(pid, number)
        return f"process {pid}"

    def close(self) -> None:
        """End the bystanders and the wire."""
        for bystander, _ in self.bystanders:
            bystander.kill()
            bystander.wait()
        self.link.close()

    def _session(self, experiments: str) -> Path:
        known = self.host.folder / "known-hosts-of-link"
        key = subprocess.run(
            ["ssh-keygen", "-y", "-f", self.host.sshd.folder / "host_key"], check=True, capture_output=True, text=True
        ).stdout
        known.write_text(f"[{self.link.address}]:{self.link.port} {key}")
        return self.host.write_session(
            experiments,
            request_deadline_s=REQUEST_DEADLINE_S,
            run_deadline_s=RUN_DEADLINE_S,
            host=self.link.address,
            ssh_port=self.link.port,
            known_hosts=known,
            lease_s=LEASE_S,
            start_deadline_s=20,
            close_out_blocks=1,
            prompt_tokens=16,
        )

    def _bystander(self, name: str) -> tuple[subprocess.Popen[bytes], int | None]:
        """Somebody else's process that looks like ours: who kills by name kills it."""
        idle = (sys.executable, "-c", "import time; time.sleep(86400)")
        words = [*idle, str(PROJECT / name), "--port", str(free_port())]
        started = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        return started, start_ticks(started.pid)


@contextlib.contextmanager
def ground(
    folder: Path, model: Path, needs: frozenset[str] = frozenset(), experiments: str = EXPERIMENTS
) -> Iterator[Ground]:
    """A serving server behind sshd and a wire, with what `needs` names; nothing of it outlives the block."""
    with contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        disks = {}
        for need, name in (("host-disk", "ratchet"), ("agent-disk", "agent")):
            if need in needs:
                disks[need] = Disk(folder / name)
                stack.callback(disks[need].close)
        network = Network() if "network" in needs else None
        if network is not None:
            stack.callback(network.close)
        host = stack.enter_context(rig(folder, model))
        if network is not None:
            host.agents_within = network.within
        link = Link(host.sshd.direct_port, "127.0.0.1" if network is None else network.address)
        made = Ground(host, link, network, disks, experiments)
        stack.callback(made.close)
        if "clock" in needs:
            made.fake_clock()
        host.start_server()
        yield made
