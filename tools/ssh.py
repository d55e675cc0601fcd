"""The SSH door: the only module that imports asyncssh; it runs scripts on a host and must not interpret their output.

What was learned about SSH the hard way, and is settled here so that nobody else has to know it: a lost connection
is an unknown outcome and never a result; a command is never sent twice; output is bytes; noise from login scripts is
cut off; deadlines cover the opening of the channel too; host keys are never accepted on first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import Iterator
from typing import Self

import asyncssh

from state.errors import CommandFailed, ConfigError, HostKeyRejected, HostUnreachable, LoginRejected, OutcomeUnknown
from tools.login_shell import after_token, login_command
from tools.shell import CommandResult, PosixHost, brief
from tools.ssh_settings import SshSettings

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)

__all__ = ["SshHost", "SshSettings"]


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
        async with self._slots:
            self._in_flight += 1
            try:
                exchange = await self._exchange(script, token, stdin, timeout_s)
            finally:
                self._in_flight -= 1
        return self._result(exchange, script)

    async def _exchange(self, script: str, token: str, stdin: bytes, timeout_s: float) -> _Exchange:
        """Try again while the command surely has not been sent; after that, its end or OutcomeUnknown."""
        command = login_command(script, token)
        give_up = asyncio.get_running_loop().time() + timeout_s + self.settings.reconnect_s
        for wait_s in _waits():
            connection = await self._connected()
            exchange = _Exchange(connection, token)
            try:
                async with asyncio.timeout(timeout_s):
                    await exchange.perform(command, stdin)
            except TimeoutError:
                raise self._timed_out(exchange, script, timeout_s) from None
            except (asyncssh.Error, OSError) as error:
                if exchange.channel is not None and connection.is_closed():
                    raise self._lost(exchange, script) from error
                if exchange.channel is not None or asyncio.get_running_loop().time() > give_up:
                    raise self._no_session(script, error) from error
                await asyncio.sleep(wait_s)
                continue
            if not exchange.complete:
                raise self._lost(exchange, script)
            return exchange
        raise AssertionError("the waits above never end")

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._dialling:
            if self._closed:
                raise HostUnreachable("the connection was closed by us", where=self.settings.where())
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._redial()
            return self._connection

    async def _redial(self) -> asyncssh.SSHClientConnection:
        """Dial until `reconnect_s` is over; a wrong key or a refused login is final at once."""
        give_up = asyncio.get_running_loop().time() + self.settings.reconnect_s
        for wait_s in _waits():
            try:
                return await dial(self.settings)
            except HostUnreachable:
                if asyncio.get_running_loop().time() + wait_s > give_up:
                    raise
            await asyncio.sleep(wait_s)
        raise AssertionError("the waits above never end")

    def _result(self, exchange: _Exchange, script: str) -> CommandResult:
        stdout = after_token(exchange.token, bytes(exchange.stdout))
        stderr = after_token(exchange.token, bytes(exchange.stderr))
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

    def _timed_out(self, exchange: _Exchange, script: str, timeout_s: float) -> HostUnreachable | OutcomeUnknown:
        where = {**self.settings.where(), "command": brief(script), "waited_s": timeout_s}
        if exchange.channel is not None:
            return OutcomeUnknown(
                f"no end of a remote command within {timeout_s:g} s; it may still be running on the host",
                where=where,
                tail=exchange.said,
                do="look at the host for what the command did before it is run again",
            )
        if self._in_flight == 1:
            exchange.connection.abort()  # a channel that opens later would hold one of the server's sessions for good
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

    def __init__(self, connection: asyncssh.SSHClientConnection, token: str) -> None:
        self.connection = connection
        self.token = token
        self.channel: asyncssh.SSHClientChannel[bytes] | None = None
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.exit: int | None = None
        self.signal: str | None = None
        self.cause: Exception | None = None
        self._eof = False
        self._ended = asyncio.Event()

    async def perform(self, command: str, stdin: bytes) -> None:
        """Send the command and its input, and wait until the channel is closed from the other side."""
        try:
            channel, _ = await self.connection.create_session(lambda: self, command, encoding=None)
            with contextlib.suppress(BrokenPipeError):  # a command may end without reading its input
                channel.write(stdin)
                channel.write_eof()
            await self._ended.wait()
        finally:
            if self.channel is not None and not self._ended.is_set():
                self.channel.abort()

    @property
    def complete(self) -> bool:
        """True when the host told how the command ended and all of its output has come."""
        told = self.exit is not None or self.signal is not None
        return told and (self._eof or (self.cause is None and not self.connection.is_closed()))

    @property
    def said(self) -> str:
        """The last of what was received, for error messages."""
        said = [after_token(self.token, bytes(stream)) for stream in (self.stderr, self.stdout)]
        return (said[0] or said[1] or b"")[-4096:].decode("utf-8", "replace")

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """From here on the command may be on its way."""
        self.channel = chan

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        """Keep everything; both streams are always drained, so that neither can block the other."""
        (self.stderr if datatype == asyncssh.EXTENDED_DATA_STDERR else self.stdout).extend(data)

    def eof_received(self) -> bool:
        """Keep our side open: the exit status is still to come."""
        self._eof = True
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
    except asyncssh.HostKeyNotVerifiable as error:
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
    except (asyncssh.ConnectionLost, asyncssh.KeyExchangeFailed) as error:
        if await _shows_another_key(settings, trusted):
            raise _key_rejected(settings, trusted, error) from error
        raise _unreachable(settings, str(error)) from error
    except OSError as error:
        raise _unreachable(settings, _in_words(error)) from error
    except asyncssh.Error as error:
        raise _unreachable(settings, str(error) or type(error).__name__) from error


def _unreachable(settings: SshSettings, why: str) -> HostUnreachable:
    return HostUnreachable(
        f"no SSH connection to {settings.address}",
        where={**settings.where(), "cause": why},
        do="check that the host is up and that host, port and firewall let SSH through",
    )


def _in_words(error: OSError) -> str:
    """`Connection refused` rather than asyncio's `Connect call failed`; a resolver's codes are not errno's."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


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


async def _shows_another_key(settings: SshSettings, trusted: asyncssh.SSHKnownHosts) -> bool:
    """Whether the host has a key other than those we know: one of another kind just ends the handshake, unexplained."""
    known = trusted.match(settings.known_as, "", None)[0]
    if not known:
        return False
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            shown = await asyncssh.get_server_host_key(settings.host, settings.port, config=None)
    except (OSError, asyncssh.Error):
        return False
    return shown is not None and shown.public_data not in [key.public_data for key in known]


def _key_rejected(settings: SshSettings, trusted: asyncssh.SSHKnownHosts, error: Exception) -> HostKeyRejected:
    """Unknown and changed look the same to asyncssh; what known_hosts says of this host tells them apart."""
    where = {**settings.where(), "known_hosts": ", ".join(map(str, settings.known_hosts_files)), "cause": error}
    if any(trusted.match(settings.known_as, "", None)):
        return HostKeyRejected(
            f"the host key of {settings.known_as} has CHANGED: another machine answers, or it was reinstalled",
            where=where,
            do="find out why before going on; only if it was reinstalled: "
            f"ssh-keygen -R '{settings.known_as}', then check and accept the new key with ssh",
        )
    return HostKeyRejected(
        f"the host key of {settings.known_as} is unknown",
        where=where,
        do=f"connect once by hand (ssh -p {settings.port} {settings.user}@{settings.host}), "
        "compare the fingerprint with the one shown on the host, and accept it",
    )


def _waits() -> Iterator[float]:
    """Seconds between tries, growing up to a cap, without end."""
    return itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1]))
