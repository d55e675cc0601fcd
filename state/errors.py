"""Every error Ratchet raises on purpose; it formats stories and must not catch, log or exit.

RatchetError                     1  a bug unless a subclass says otherwise
├── ConfigError                  2  the session file, a flag or a local file is wrong
├── HostError                    3  the host cannot be used
│   ├── HostUnreachable             refused, timed out, lost before a command was sent
│   ├── HostKeyRejected             unknown or changed host key
│   ├── LoginRejected               authentication failed
│   ├── HostRebooted                the host was booted while we held it
│   └── CommandFailed               a remote command said no
├── ServerError                  3  the inference server cannot be used
│   ├── ServerNotFound              nothing runs that the session file describes
│   └── StartFailed                 a launch ended or never generated
├── StoreError                   3  state.db cannot be read or written
│   ├── StoreFull                   no space is left for it
│   ├── StoreUnwritable             its folder or file is read-only, missing or not ours
│   ├── StoreBusy                   another program keeps it locked
│   ├── StoreDamaged                it is empty, foreign, damaged, or events are missing
│   └── StoreNewer                  a newer version of this program wrote it
├── OutcomeUnknown               4  the connection died while a command ran: neither success nor failure
├── StoppedByOperator            4  Ctrl-C, SIGTERM or `stop`: resumable
├── StoppedByFailure             4  a failure that trying on cannot help: known-good serves, resumable
├── RefusedForSafety             5  going on could harm something that is not ours
│   ├── ForeignChange               somebody else changed the target
│   ├── ForeignTraffic              somebody else keeps using the server
│   ├── DrainFailed                 the server could not be taken out of its users' way
│   ├── LeasePassedOn               the host's watcher or another agent took over
│   ├── TargetLocked                another agent holds the target or the database
│   └── PolicyRefused               a change that the session file forbids
└── NeedsHuman                   6  the known-good configuration could not be proven
"""

from __future__ import annotations

from collections.abc import Mapping


class RatchetError(Exception):
    """What happened, where, the last lines, and what the operator can do.

    `where` holds short facts (host, command, key, exit); `tail` the last lines of output; `do` the advice.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: Mapping[str, object] | None = None, tail: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = {key: str(value) for key, value in (where or {}).items()}
        self.tail = tail.strip()
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {key}: {value}" for key, value in self.where.items()]
        if self.tail:
            lines.append("  last lines:")
            lines += [f"    {line}" for line in self.tail.splitlines()[-12:]]
        if self.do:
            lines.append(f"  what you can do: {self.do}")
        return "\n".join(lines)


class ConfigError(RatchetError):
    """The session file, an argument or a local file is wrong; nothing was touched."""

    exit_code = 2


class HostError(RatchetError):
    """The host cannot be used."""

    exit_code = 3


class HostUnreachable(HostError):
    """No connection, or it was lost before the command was sent."""


class HostKeyRejected(HostError):
    """The host's key is unknown, or is not the one we know."""


class LoginRejected(HostError):
    """The host refused our key or user."""


class HostRebooted(HostError):
    """The host was booted since we last saw a process of ours; what serves now is observed anew."""


class CommandFailed(HostError):
    """A remote command ended with an exit code that means no."""


class ServerError(RatchetError):
    """The inference server cannot be used."""

    exit_code = 3


class ServerNotFound(ServerError):
    """No process on the host is the server that the session file describes."""


class StartFailed(ServerError):
    """A launch ended before it could generate, or never did within its deadline."""


class StoreError(RatchetError):
    """state.db cannot be read or written; what was committed before is still there."""

    exit_code = 3


class StoreFull(StoreError):
    """There is no space left for state.db."""


class StoreUnwritable(StoreError):
    """state.db or its folder is read-only, missing, not ours, or on a disk that fails."""


class StoreBusy(StoreError):
    """Another program that is no agent keeps state.db locked."""


class StoreDamaged(StoreError):
    """state.db is empty, foreign or damaged, or events are missing that were written before."""


class StoreNewer(StoreError):
    """state.db was written by a newer version of this program."""


class OutcomeUnknown(RatchetError):
    """The connection died while a remote command ran; only observation can tell what it did."""

    exit_code = 4


class StoppedByOperator(RatchetError):
    """A person or the system asked us to stop; the session can be resumed."""

    exit_code = 4


class StoppedByFailure(RatchetError):
    """What failed would fail again whatever is tried next; known-good comes back, the session can be resumed."""

    exit_code = 4


class RefusedForSafety(RatchetError):
    """Going on could harm something that is not ours."""

    exit_code = 5


class ForeignChange(RefusedForSafety):
    """The observed server matches nothing that we wrote."""


class ForeignTraffic(RefusedForSafety):
    """Somebody else keeps sending requests to the server, so nothing can be measured."""


class DrainFailed(RefusedForSafety):
    """The server could not be taken out of its users' way, so it was not disturbed."""


class LeasePassedOn(RefusedForSafety):
    """The lease that we held is over: the host's watcher or another agent has the target now."""


class TargetLocked(RefusedForSafety):
    """Another agent holds the target or its database."""


class PolicyRefused(RefusedForSafety):
    """A change that the session file or a hard constraint forbids."""


class NeedsHuman(RatchetError):
    """The known-good configuration could not be proven, or not be given back to its users; a person has to look."""

    exit_code = 6
