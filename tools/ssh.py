"""The SSH door: the only module that imports asyncssh; it runs scripts on a host and must not interpret their output.

What was learned about SSH the hard way, and is settled here so that nobody else has to know it: a lost connection
is an unknown outcome and never a result; a command is never sent twice; output is bytes; noise from login scripts is
cut off; deadlines cover the opening of the channel too; host keys are never accepted on first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import string
from pathlib import Path
from typing import Self

import asyncssh
from pydantic import Field

from state.errors import CommandFailed, ConfigError, HostKeyRejected, HostUnreachable, LoginRejected, OutcomeUnknown
from state.models import Frozen
from tools.shell import CommandResult, PosixHost, brief

COMMAND_LIMIT_BYTES = 120_000
"""Linux takes at most 128 KiB in one argument; longer texts travel by `put`."""

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
PLAIN = frozenset(string.ascii_letters + string.digits + " _./:,=+@-")


class SshSettings(Frozen):
    """Everything needed to reach a host; `~/.ssh/config` is not read, so that what is used is what is written here."""

    host: str
    port: int = Field(default=22, ge=1, le=65535)
    user: str
    identity_file: Path | None = Field(default=None, description="private key; None: the agent and ~/.ssh/id_*")
    known_hosts: Path | None = Field(default=None, description="None: ~/.ssh/known_hosts and the system's own file")
    connect_timeout_s: float = Field(default=15.0, gt=0)
    keepalive_s: float = Field(default=5.0, gt=0, description="interval of the checks that the peer still answers")
    keepalive_max: int = Field(default=3, ge=1, description="unanswered checks after which a connection is lost")
    max_channels: int = Field(default=6, ge=1, description="commands at a time; the server's MaxSessions is often 10")
    reconnect_s: float = Field(default=60.0, ge=0, description="how long a lost host is sought again")

    @property
    def address(self) -> str:
        """`host`, or `host:port` when the port is not 22."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    @property
    def known_as(self) -> str:
        """How known_hosts files spell this host."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def known_hosts_files(self) -> tuple[Path, ...]:
        """Where this host's key is looked up."""
        if self.known_hosts is not None:
            return (self.known_hosts.expanduser(),)
        return (Path.home() / ".ssh" / "known_hosts", Path("/etc/ssh/ssh_known_hosts"))

    def where(self) -> dict[str, object]:
        """The facts that every error about the connection carries."""
        return {"host": self.host, "port": self.port, "user": self.user}


class SshHost(PosixHost):
    """A `Host` behind one SSH connection, which is renewed when it was lost and nothing runs on it."""

    def __init__(self, settings: SshSettings) -> None:
        self.settings = settings
        self.name = settings.address
        self._connection: asyncssh.SSHClientConnection | None = None
        self._dialling = asyncio.Lock()
        self._slots = asyncio.Semaphore(settings.max_channels)
        self._in_flight = 0
        self._closed = False

    @classmethod
    async def connect(cls, settings: SshSettings) -> Self:
        """Connect once, without retries.

        Raises HostUnreachable, HostKeyRejected, LoginRejected, or ConfigError for unusable key files.
        """
        host = cls(settings)
        host._connection = await dial(settings)
        return host

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; jobs on the host go on. Later calls of `run` raise HostUnreachable."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.close()
        try:
            async with asyncio.timeout(5):
                await connection.wait_closed()
        except TimeoutError:
            connection.abort()

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """See `Host.run`; reconnects first when the connection is gone, and sends the command at most once."""
        token = f"ratchet-begin-{secrets.token_hex(8)}"
        command = login_command(script, token)
        async with self._slots:
            self._in_flight += 1
            try:
                exchange = await self._exchange(command, script, stdin, timeout_s)
            finally:
                self._in_flight -= 1
        return self._result(exchange, token, script)

    async def _exchange(self, command: str, script: str, stdin: bytes, timeout_s: float) -> _Exchange:
        """Repeat while the command surely has not been sent; then wait for its end or say that it is unknown."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s + self.settings.reconnect_s
        for attempt in range(1_000_000):
            connection = await self._connected()
            exchange = _Exchange()
            try:
                async with asyncio.timeout(timeout_s):
                    await exchange.perform(connection, command, stdin)
            except TimeoutError:
                raise self._timed_out(connection, exchange, script, timeout_s) from None
            except (asyncssh.Error, OSError) as error:
                if exchange.channel is not None and connection.is_closed():
                    raise self._lost(exchange, script) from error
                if exchange.channel is not None or loop.time() > give_up:
                    raise self._no_session(script, error) from error
                await asyncio.sleep(_backoff(attempt))
            else:
                if not exchange.complete:
                    raise self._lost(exchange, script)
                return exchange
        raise AssertionError("unreachable")

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._dialling:
            if self._closed:
                raise HostUnreachable("the connection was closed by us", where=self.settings.where())
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._redial()
            return self._connection

    async def _redial(self) -> asyncssh.SSHClientConnection:
        """Dial until `reconnect_s` is over; a wrong key or a refused login is final at once."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self.settings.reconnect_s
        attempt = 0
        while True:
            try:
                return await dial(self.settings)
            except HostUnreachable:
                if loop.time() + _backoff(attempt) > give_up:
                    raise
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    def _result(self, exchange: _Exchange, token: str, script: str) -> CommandResult:
        stdout = _after(token.encode(), bytes(exchange.stdout))
        stderr = _after(token.encode(), bytes(exchange.stderr))
        number = 128 + getattr(signal, f"SIG{exchange.signal}", 0) if exchange.signal else exchange.exit
        result = CommandResult(
            exit=-1 if number is None else number,
            signal=exchange.signal,
            stdout=bytes(exchange.stdout) if stdout is None else stdout,
            stderr=bytes(exchange.stderr) if stderr is None else stderr,
        )
        if stdout is None:
            raise CommandFailed(
                "the login shell on the host did not run our command",
                where={**self.settings.where(), "command": brief(script), "ended": result.ending},
                tail=result.tail,
                do=f"give {self.settings.user} a login shell that runs commands and has /bin/sh",
            )
        return result

    # --- the stories of what went wrong --------------------------------------------------------------------

    def _timed_out(
        self, connection: asyncssh.SSHClientConnection, exchange: _Exchange, script: str, timeout_s: float
    ) -> HostUnreachable | OutcomeUnknown:
        where = {**self.settings.where(), "command": brief(script), "waited_s": timeout_s}
        if exchange.channel is not None:
            return OutcomeUnknown(
                f"no end of a remote command within {timeout_s:g} s; it may still be running on the host",
                where=where,
                tail=exchange.said,
                do="look at the host for what the command did before it is run again",
            )
        if self._in_flight == 1:
            connection.abort()  # a channel that opens later would hold one of the server's sessions for good
        return HostUnreachable(
            f"the host did not open a channel within {timeout_s:g} s; the command was not sent",
            where=where,
            do="check the network and the load of the host",
        )

    def _lost(self, exchange: _Exchange, script: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            "the connection was lost while a remote command ran; it may have ended, failed or still be running",
            where={**self.settings.where(), "command": brief(script), "cause": exchange.cause or "channel closed"},
            tail=exchange.said,
            do="look at the host for what the command did before it is run again",
        )

    def _no_session(self, script: str, error: Exception) -> HostUnreachable:
        return HostUnreachable(
            "the host refuses to run commands in this connection; the command was not started",
            where={**self.settings.where(), "command": brief(script), "cause": error},
            do="raise MaxSessions in the host's sshd_config, or lower max_channels here",
        )


class _Exchange(asyncssh.SSHClientSession[bytes]):
    """One command on one channel: collects what comes back; `channel` is set before the command can be sent."""

    def __init__(self) -> None:
        self.channel: asyncssh.SSHClientChannel[bytes] | None = None
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.exit: int | None = None
        self.signal: str | None = None
        self.cause: Exception | None = None
        self._ended = asyncio.Event()

    async def perform(self, connection: asyncssh.SSHClientConnection, command: str, stdin: bytes) -> None:
        """Send the command and its input, and wait until the channel is closed from the other side."""
        try:
            channel, _ = await connection.create_session(lambda: self, command, encoding=None)
            with contextlib.suppress(BrokenPipeError):  # a command may end without reading its input
                channel.write(stdin)
                channel.write_eof()
            await self._ended.wait()
        finally:
            if self.channel is not None and not self._ended.is_set():
                self.channel.abort()

    @property
    def complete(self) -> bool:
        """True when the host told how the command ended and then closed the channel in order."""
        return self.cause is None and (self.exit is not None or self.signal is not None)

    @property
    def said(self) -> str:
        """The last of what was received, for error messages."""
        return bytes((self.stderr or self.stdout)[-4096:]).decode("utf-8", "replace")

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """From here on the command may be on its way."""
        self.channel = chan

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        """Keep everything; both streams are always drained, so that neither can block the other."""
        (self.stderr if datatype == asyncssh.EXTENDED_DATA_STDERR else self.stdout).extend(data)

    def eof_received(self) -> bool:
        """Keep our side open: the exit status is still to come."""
        return True

    def exit_status_received(self, status: int) -> None:
        """The command exited."""
        self.exit = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        """The command died of a signal; the name comes without SIG."""
        self.signal = signal

    def connection_lost(self, exc: Exception | None) -> None:
        """The channel is closed; `exc` is None when that happened in order."""
        self.cause = exc
        self._ended.set()


async def dial(settings: SshSettings) -> asyncssh.SSHClientConnection:
    """One attempt to connect and log in; raises what `SshHost.connect` raises."""
    trusted = trusted_keys(settings)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            return await asyncssh.connect(
                settings.host,
                settings.port,
                username=settings.user,
                client_keys=_client_keys(settings),
                known_hosts=trusted,
                config=None,
                preferred_auth="publickey",
                keepalive_interval=settings.keepalive_s,
                keepalive_count_max=settings.keepalive_max,
            )
    except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as error:
        raise _key_rejected(settings, trusted, error) from error
    except asyncssh.PermissionDenied as error:
        raise LoginRejected(
            "the host refused our key",
            where={**settings.where(), "identity_file": settings.identity_file or "agent and ~/.ssh/id_*"},
            tail=str(error),
            do="put the public key into the host's authorized_keys for this user; check user and identity_file",
        ) from error
    except TimeoutError as error:
        raise _unreachable(settings, f"no answer within {settings.connect_timeout_s:g} s") from error
    except (OSError, asyncssh.Error) as error:
        raise _unreachable(settings, str(error) or type(error).__name__) from error


def _unreachable(settings: SshSettings, why: str) -> HostUnreachable:
    return HostUnreachable(
        f"no SSH connection to {settings.address}",
        where={**settings.where(), "cause": why},
        do="check that the host is up and that host, port and firewall let SSH through",
    )


def _client_keys(settings: SshSettings) -> list[str] | tuple[()]:
    """The key file as asyncssh takes it, read once beforehand so that its own errors are told apart."""
    if settings.identity_file is None:
        return ()
    path = settings.identity_file.expanduser()
    try:
        asyncssh.read_private_key(path)
    except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise ConfigError(
            "the private key cannot be used",
            where={"identity_file": path, "cause": error},
            do="name a readable key without passphrase, or load it into ssh-agent and leave identity_file out",
        ) from error
    return [str(path)]


def trusted_keys(settings: SshSettings) -> asyncssh.SSHKnownHosts:
    """All readable known_hosts files as one; ConfigError when the named file is missing or damaged."""
    text = []
    for path in settings.known_hosts_files:
        try:
            text.append(path.read_text())
        except OSError as error:
            if settings.known_hosts is not None:
                raise ConfigError(
                    "the known_hosts file cannot be read", where={"known_hosts": path, "cause": error}
                ) from error
    try:
        return asyncssh.import_known_hosts("\n".join(text))
    except ValueError as error:
        files = ", ".join(map(str, settings.known_hosts_files))
        raise ConfigError("a known_hosts file is damaged", where={"known_hosts": files, "cause": error}) from error


def _key_rejected(
    settings: SshSettings, trusted: asyncssh.SSHKnownHosts, error: Exception
) -> HostKeyRejected | HostUnreachable:
    """Unknown and changed look the same to asyncssh; what known_hosts says of this host tells them apart."""
    known = any(trusted.match(settings.host, "", settings.port))
    where = {**settings.where(), "known_hosts": ", ".join(map(str, settings.known_hosts_files)), "cause": error}
    if known:
        return HostKeyRejected(
            f"the host key of {settings.known_as} is NOT the one we know: another machine answers, or it was reinstalled",
            where=where,
            do="find out why before going on; only if it was reinstalled: "
            f"ssh-keygen -R '{settings.known_as}', then check and accept the new key with ssh",
        )
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return _unreachable(settings, str(error))
    return HostKeyRejected(
        f"the host key of {settings.known_as} is unknown",
        where=where,
        do=f"connect once by hand (ssh -p {settings.port} {settings.user}@{settings.host}), "
        "compare the fingerprint with the one shown on the host, and accept it",
    )


def login_command(script: str, token: str) -> str:
    """The command line sent to the host: any login shell starts /bin/sh, which prints `token` on both streams first.

    The script is carried in octal where shells disagree (fish and csh read quotes, backslashes, `!` and newlines in
    their own ways); whatever login scripts print stands before the token and is cut off. Raises ValueError when the
    script does not fit into one argument.
    """
    text = f"printf %s {token}; printf %s {token} >&2\n{script}\n"
    if "\0" in text:
        raise ValueError("a script cannot contain NUL")
    coded = "".join(chr(b) if chr(b) in PLAIN else f"\\0{b:03o}" for b in text.encode("utf-8", "surrogateescape"))
    if len(coded) > COMMAND_LIMIT_BYTES:
        raise ValueError(f"a script of {len(coded)} bytes is too long for a command line: put it into a file")
    return f'exec /bin/sh -c \'eval "$(printf %b "{coded}")"\''


def _after(token: bytes, data: bytes) -> bytes | None:
    before, found, payload = data.partition(token)
    return payload if found else None


def _backoff(attempt: int) -> float:
    return BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
