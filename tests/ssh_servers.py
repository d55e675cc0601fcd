"""Real SSH servers on loopback for tests: OpenSSH's sshd and the demo's, each behind a relay that can stall and cut.

Nothing here touches the machine's own SSH: keys, ports and configuration are made in the folder that is passed in, and
only processes started here are signalled.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

import pytest

from tools.ssh_settings import SshSettings

SSHD = "/usr/sbin/sshd"
ROOT = Path(__file__).parent.parent


class Relay:
    """A TCP relay on loopback in threads: `stall` holds all bytes back, `cut` resets all connections."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.limit: int | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stall(self) -> None:
        """Let nothing through until `resume`."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let everything through again."""
        self._flowing.set()

    def cut(self) -> None:
        """Break every connection; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut_after(self, count: int) -> None:
        """Break every connection once `count` more bytes went to the server."""
        self.limit = count

    def close(self) -> None:
        """Stop listening and end all threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            pumps = [
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True),
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True),
            ]
            closer = threading.Thread(target=self._close_after, args=(pumps, client, server), daemon=True)
            self._threads += [*pumps, closer]
            for thread in (*pumps, closer):
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, upward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
                if upward and self.limit is not None:
                    self.limit -= len(data)
                    if self.limit < 0:
                        self.limit = None
                        self.cut()
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _close_after(self, pumps: list[threading.Thread], *sockets: socket.socket) -> None:
        for pump in pumps:
            pump.join()
        for one in sockets:
            one.close()


class SshServer:
    """A running server; `settings` lead to it through the relay, `direct_port` is its own."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], port: int, user: str) -> None:
        self.folder = folder
        self.process = process
        self.direct_port = port
        self.relay = Relay(port)
        known_hosts = folder / "known_hosts_relay"
        self.write_known_hosts(known_hosts, folder / "host_key")
        self.settings = SshSettings(
            host="127.0.0.1",
            port=self.relay.port,
            user=user,
            identity_file=folder / "client_key",
            known_hosts=known_hosts,
            reconnect_s=10,
        )

    def write_known_hosts(self, path: Path, key: Path) -> Path:
        """A known_hosts file that expects `key` from this server."""
        public = subprocess.run(["ssh-keygen", "-y", "-f", key], check=True, capture_output=True, text=True).stdout
        path.write_text(f"[127.0.0.1]:{self.relay.port} {public}")
        return path

    def kill_connections(self) -> None:
        """Kill what serves each connection: OpenSSH's children, or for the demo's single process the TCP links."""
        children = [pid for pid in descendants(self.process.pid) if comm(pid).startswith("sshd")]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not children:
            self.relay.cut()

    def stop(self) -> None:
        """End the server and every connection to it; commands of sessions are left alone, as sshd does."""
        self.kill_connections()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.relay.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@contextlib.contextmanager
def openssh(
    folder: Path,
    *options: str,
    home: Path | None = None,
    within: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[SshServer]:
    """A real sshd as our child, for the current user; `options` are extra lines of sshd_config.

    `within` are words before its command line, such as those that enter a namespace.

    Commands get `home` (by default an empty folder) for HOME, so that nobody's login files are read, and `environ`.
    """
    if not Path(SSHD).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip(f"{SSHD} and ssh-keygen are needed: install openssh-server")
    folder.mkdir(parents=True, exist_ok=True)
    home = home or folder / "home"
    home.mkdir(exist_ok=True)
    for name in ("host_key", "client_key"):
        make_key(folder / name)
    shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own empty folder; absent until a service made it
    port = free_port()
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder / 'host_key'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin yes",
        "MaxStartups 100",
        f"SetEnv {' '.join(f'{name}={value}' for name, value in {'HOME': home, **environ}.items())}",
        *options,
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*within, SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    await_port(port, process, folder / "log")
    with SshServer(folder, process, port, pwd.getpwuid(os.getuid()).pw_name) as server:
        yield server


@contextlib.contextmanager
def demo_sshd(folder: Path) -> Iterator[SshServer]:
    """The demo's asyncssh server as our child."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tools.demo.sshd", "--dir", str(folder), "--die-with-parent"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, cwd=ROOT)
    deadline = time.monotonic() + 30
    while not (folder / "port").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"no demo SSH server: {(folder / 'log').read_text()}")
        time.sleep(0.05)
    port = int((folder / "port").read_text())
    with SshServer(folder, process, port, pwd.getpwuid(os.getuid()).pw_name) as server:
        yield server


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new private key, its public half beside it."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "", "-f", path], check=True)
    return path


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until somebody accepts on the port."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"sshd does not listen: {log.read_text()}") from None
            time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """All living descendants of a process, nearest first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for one in found:
        found += parents.get(one, [])
    return found


def comm(pid: int) -> str:
    """The kernel's name of a process; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
