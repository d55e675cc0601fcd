"""The seam between Ratchet and a host: POSIX sh in, bytes out; it knows no transport and must not retry or judge.

Everything on the remote side is POSIX sh and procfs, so that nothing has to be installed there. Three outcomes are
kept apart: a command that ran (whatever its exit code) is a `CommandResult`, a command that said no to `check` is a
`CommandFailed`, and a command of which nobody knows whether it ran is an `OutcomeUnknown`.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from state.errors import CommandFailed

TRANSFER_TIMEOUT_S = 120.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind: `exit` is 128 + n when the shell itself died of signal n, which `signal` names."""

    exit: int
    signal: str | None
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        """True when the command exited by itself with 0."""
        return self.exit == 0 and self.signal is None

    @property
    def text(self) -> str:
        """Standard output as UTF-8; bytes that are none become U+FFFD, since logs contain junk."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def tail(self) -> str:
        """The last lines of standard error, or of standard output where nothing was said on error."""
        said = self.stderr.strip() or self.stdout.strip()
        return "\n".join(said[-4096:].decode("utf-8", "replace").splitlines()[-12:])

    @property
    def ending(self) -> str:
        """`exit 3` or `killed by SIGTERM`."""
        return f"exit {self.exit}" if self.signal is None else f"killed by SIG{self.signal}"


class Host(Protocol):
    """A machine that runs POSIX sh scripts and keeps files."""

    @property
    def name(self) -> str:
        """What errors and logs call this host."""
        ...

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """Run a POSIX sh script; a non-zero exit is a result.

        Raises HostUnreachable when it surely never started, OutcomeUnknown when the connection was lost or
        `timeout_s` passed while it ran: it may then still be running.
        """
        ...

    async def check(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """Like `run`, but anything other than exit 0 raises CommandFailed."""
        ...

    async def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Replace the file `path` atomically by `data`; creates no directories, never leaves half a file there.

        Raises CommandFailed when it cannot be written. Safe to repeat after an OutcomeUnknown.
        """
        ...

    async def get(self, path: str, *, offset: int = 0, limit: int = CHUNK_BYTES) -> bytes:
        """At most `limit` bytes from byte `offset` on; b"" at the end. Raises CommandFailed when unreadable."""
        ...

    async def close(self) -> None:
        """Let go of the connection; whatever runs detached on the host goes on."""
        ...


class PosixHost(ABC):
    """`check`, `put` and `get` in terms of `run`, the same for every transport."""

    name: str

    @abstractmethod
    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """See `Host.run`."""

    @abstractmethod
    async def close(self) -> None:
        """See `Host.close`."""

    async def check(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """See `Host.check`."""
        result = await self.run(script, stdin=stdin, timeout_s=timeout_s)
        if result.ok:
            return result
        raise CommandFailed(
            "a remote command failed",
            where={"host": self.name, "command": brief(script), "ended": result.ending},
            tail=result.tail,
            do="run the command on the host by hand; the last lines above are its own words",
        )

    async def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See `Host.put`."""
        result = await self.run(put_script(path, data, mode), stdin=data, timeout_s=TRANSFER_TIMEOUT_S)
        if not result.ok:
            raise CommandFailed(
                "a file could not be written on the host",
                where={"host": self.name, "path": path, "bytes": len(data), "ended": result.ending},
                tail=result.tail,
                do="check that the directory exists, is writable for this user and that the disk is not full",
            )

    async def get(self, path: str, *, offset: int = 0, limit: int = CHUNK_BYTES) -> bytes:
        """See `Host.get`."""
        if offset < 0 or limit < 0:
            raise ValueError(f"offset {offset} and limit {limit} must not be negative")
        result = await self.run(get_script(path, offset, limit), timeout_s=TRANSFER_TIMEOUT_S)
        if not result.ok:
            raise CommandFailed(
                "a file could not be read on the host",
                where={"host": self.name, "path": path, "ended": result.ending},
                tail=result.tail,
                do="check that the file exists and is readable for this user",
            )
        return result.stdout


def quote(args: Iterable[str]) -> str:
    """One POSIX sh command line that yields exactly these words."""
    return shlex.join(args)


def brief(script: str, width: int = 160) -> str:
    """The script in one line, cut to `width` characters, for messages."""
    line = "; ".join(part.strip() for part in script.strip().splitlines() if part.strip())
    return line if len(line) <= width else line[: width - 1] + "…"


def put_script(path: str, data: bytes, mode: int) -> str:
    """Sh that stores its standard input under `path`: temporary name, size and hash checked, then renamed.

    A connection that is cut looks like an early end of input: the size is then wrong, nothing is renamed, and saying
    so raises SIGPIPE, which must not keep the temporary file from being removed.
    """
    return f"""
umask 077
target={shlex.quote(path)}
temp=$target.{secrets.token_hex(6)}.part
trap 'rm -f -- "$temp"' EXIT
trap 'exit 1' HUP INT TERM PIPE
if [ -d "$target" ]; then printf '%s: is a directory\\n' "$target" >&2; exit 1; fi
cat >"$temp" || exit 1
size=$(wc -c <"$temp") || exit 1
if [ "$size" -ne {len(data)} ]; then echo "received $size of {len(data)} bytes" >&2; exit 1; fi
if command -v sha256sum >/dev/null; then
  sum=$(sha256sum <"$temp") || exit 1
  if [ "${{sum%% *}}" != {hashlib.sha256(data).hexdigest()} ]; then echo "sha256 differs" >&2; exit 1; fi
fi
chmod {mode:o} -- "$temp" && mv -f -- "$temp" "$target"
"""


def get_script(path: str, offset: int, limit: int) -> str:
    """Sh that writes `limit` bytes of a file from `offset` on; fails when the file cannot be opened."""
    return f"""
source={shlex.quote(path)}
if [ -d "$source" ]; then printf '%s: is a directory\\n' "$source" >&2; exit 1; fi
exec <"$source" || exit 1
tail -c +{offset + 1} | head -c {limit}
"""
