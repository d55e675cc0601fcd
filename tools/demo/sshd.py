"""The demo's SSH server: a real one (asyncssh) on loopback, with keys of its own, in a process of its own.

It must not listen anywhere but on 127.0.0.1, offer a terminal or forwarding, hand on our environment, or end what a
session started: as under OpenSSH, a command outlives a lost connection. Commands run as the current user.

Run it as `python -m tools.demo.sshd --dir DIR [--port N] [--die-with-parent]`. DIR then holds `host_key`, `client_key`,
`authorized_keys`, `known_hosts` and, as soon as connections are accepted, `port`.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import asyncssh

HOST = "127.0.0.1"
CHUNK = 1 << 16
HANDED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""All that commands get of our environment, which may hold secrets of the agent."""
PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


class Session(asyncssh.SSHServerProcess[bytes]):
    """One command of one connection; signals that the client sends go to the command's process group."""

    def __init__(self) -> None:
        super().__init__(serve, None, asyncssh.sftp.MIN_SFTP_VERSION, False)
        self.child: subprocess.Popen[bytes] | None = None

    def signal_received(self, name: str) -> None:
        """A signal's name without its SIG, from the client."""
        number = signal.Signals.__members__.get(f"SIG{name}")
        if self.child and number and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)


class Server(asyncssh.SSHServer):
    """One connection; everything but sessions is refused, as asyncssh does by default."""

    def session_requested(self) -> Session:
        """A new channel wants to run something."""
        return Session()


def start(command: str | None) -> subprocess.Popen[bytes]:
    """Starts a command, or a shell on its standard input, in a session of its own with a login's environment."""
    account = pwd.getpwuid(os.getuid())
    environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    environment |= {"USER": account.pw_name, "LOGNAME": account.pw_name, "HOME": account.pw_dir, "SHELL": "/bin/sh"}
    return subprocess.Popen(
        ["/bin/sh"] if command is None else ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=account.pw_dir if os.path.isdir(account.pw_dir) else "/",
        env=environment,
        start_new_session=True,
        bufsize=0,
    )


async def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Runs one command to its end and reports how it ended; the session closes when its output does, as in OpenSSH."""
    child = start(process.command)
    if isinstance(process, Session):
        process.child = child
    ended = exit_of(child)
    assert child.stdin and child.stdout and child.stderr
    feeding = asyncio.create_task(feed(process.stdin, child.stdin))
    await asyncio.gather(copy(child.stdout, process.stdout), copy(child.stderr, process.stderr))
    code = await ended
    feeding.cancel()
    with contextlib.suppress(OSError):
        report(process, code)


def report(process: asyncssh.SSHServerProcess[bytes], code: int) -> None:
    """Sends an exit status, or for a negative code the signal that ended the command."""
    if code >= 0:
        process.exit(code)
        return
    try:
        name = signal.Signals(-code).name.removeprefix("SIG")
    except ValueError:
        name = f"{-code}@ratchet"
    process.exit_with_signal(name)


def exit_of(child: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """A future for a child's exit code; the thread that waits never keeps our process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def settle(code: int) -> None:
        if not future.cancelled():
            future.set_result(code)

    def wait() -> None:
        code = child.wait()
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            loop.call_soon_threadsafe(settle, code)

    threading.Thread(target=wait, daemon=True).start()
    return future


async def copy(pipe: IO[bytes], sink: asyncssh.SSHWriter[bytes]) -> None:
    """Copies a command's output to the client; when the client is gone the pipe is closed, so that writing fails."""
    source = asyncio.StreamReader(limit=CHUNK)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), pipe)
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error):
        return
    finally:
        transport.close()


async def feed(source: asyncssh.SSHReader[bytes], pipe: IO[bytes]) -> None:
    """Copies the client's input to a command, then closes the pipe; it ends early when either side is gone."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    sink = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error):
        return
    finally:
        transport.close()


def write_private(path: Path, data: bytes) -> None:
    """Puts a file in place that only we can read; it appears complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def prepare(directory: Path) -> None:
    """Makes the folder private and creates the keys that it lacks; the client key is the only one allowed in."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    (directory / "port").unlink(missing_ok=True)
    for path in (directory / "host_key", directory / "client_key"):
        if not path.exists():
            write_private(path, asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    write_private(directory / "authorized_keys", public_key(directory / "client_key"))


def public_key(path: Path) -> bytes:
    """The public half of a private key file, in OpenSSH's one-line form."""
    return asyncssh.read_private_key(path).export_public_key()


async def run(directory: Path, port: int) -> None:
    """Serves until SIGTERM or SIGINT; connections are then dropped, commands that still run are left alone."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    prepare(directory)
    server = await asyncssh.listen(
        HOST,
        port,
        server_factory=Server,
        server_host_keys=[directory / "host_key"],
        authorized_client_keys=str(directory / "authorized_keys"),
        encoding=None,
        allow_pty=False,
        agent_forwarding=False,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        config=None,
    )
    async with server:
        bound = server.get_port()
        write_private(directory / "known_hosts", f"[{HOST}]:{bound} ".encode() + public_key(directory / "host_key"))
        write_private(directory / "port", f"{bound}\n".encode())
        await stop.wait()
        (directory / "port").unlink(missing_ok=True)


def die_with_parent() -> None:
    """Asks the kernel for a SIGTERM when our parent ends; ends at once if that has happened already."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.sshd", description="An SSH server on loopback.")
    parser.add_argument("--dir", type=Path, required=True, help="folder for keys, known_hosts and port; made private")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    arguments = parser.parse_args(argv)
    try:
        if arguments.die_with_parent:
            die_with_parent()
        asyncio.run(run(arguments.dir, arguments.port))
    except (OSError, asyncssh.Error, asyncssh.KeyImportError) as error:
        print(f"error: no SSH server on {HOST}:{arguments.port} with {arguments.dir}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
