"""One session on a real OpenSSH server and a real llama.cpp server, killed at every point in turn until it is over.

Each life is a process of `run_agent.py` that kills itself at the first point which none before it was killed at; the
next one takes the session up again. What happened is told by witnesses that are not Ratchet's: the server's own start
log, a log of every benchmark client, and procfs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from agent.faults import VARIABLE
from state.models import Role
from tests.crash import witness
from tests.crash.kinds import kind
from tests.crash.lives import KILLED
from tests.crash.report import Case, Ledger
from tests.e2e.rig import FASTER, Agent, Rig, rig
from tests.e2e.test_real_session import REFUSED, database, spec_words, words_of
from tests.e2e.witness import start_ticks
from tools.demo import model

MOST_LIVES = 500
LEASE_S = 60
"""Long enough that no watcher acts between two lives, short enough to wait for the last one's end."""


def walk(folder: Path, ledger: Ledger, console: Console) -> None:
    """Kill the session at every point that it passes, once each, and look at the end of it. It is done as a whole."""
    if ledger.cases:
        return
    with rig(folder, model.fetch()) as host:
        host.start_server()
        session = str(host.write_session(FASTER + REFUSED, lease_s=LEASE_S))
        names = host.folder / "points"
        told: list[list[witness.Event]] = []
        for _ in range(MOST_LIVES):
            agent = live(host, session, f"walk:{names}")
            told.append(witness.committed(host.database))
            if agent.process.returncode != KILLED:
                break
            console.print(f"{len(told)} killed at {names.read_text().splitlines()[-1]}", markup=False, highlight=False)
        killed = names.read_text().splitlines()
        for case in cases(host, agent, killed, told):
            ledger.add(case)


def live(host: Rig, session: str, fault: str = "") -> Agent:
    """One life: `start` until there is a session, then `resume`; it is waited for."""
    host.around_agents = {VARIABLE: fault} if fault else {}
    try:
        begun = host.database.exists() and witness.ask(host.database, "SELECT id FROM sessions")
        return host.command(*(("resume",) if begun else ("start", session)), *database(host))
    finally:
        host.around_agents = {}


def cases(host: Rig, last: Agent, killed: list[str], told: list[list[witness.Event]]) -> Iterator[Case]:
    """One case a kill; what is wrong at the end stands in a case of its own, since no kill can be blamed for it."""
    end = witness.committed(host.database)
    for at, (name, before) in enumerate(zip(killed, told, strict=False)):
        rows = (kind(name),)
        lost = witness.lost(before, end)
        yield Case(f"{at + 1} {name}", rows if at == 0 else (), rows if at else (), lost=lost)
    yield Case(
        "the end",
        ("the whole session",),
        (),
        repeated=tuple(repeated(host)),
        wrong_end=tuple(wrong_end(host, last)),
        strays=tuple(strays(host)),
    )


def repeated(host: Rig) -> Iterator[str]:
    """Launches and clients that began twice, or that nothing in the journal intended, by their own logs."""
    intended = witness.intended(host.database) | {"operator"}
    for what, keys in (("launch", [start.launch for start in host.starts()]), ("run", host.runs())):
        for key, count in Counter(keys).items():
            if count > 1:
                yield f"{what} {key} {count} times"
            if key not in intended:
                yield f"{what} {key} without an intent"
    for key, cause in witness.ask(
        host.database, "SELECT id, json_extract(body, '$.failure.cause') FROM trials WHERE body LIKE '%abandoned%'"
    ):
        yield f"launch {key} was in vain: {cause}"


def wrong_end(host: Rig, last: Agent) -> Iterator[str]:
    """Why the end is not a session that is done, with its final configuration serving as the only server."""
    if last.process.returncode not in (0, 2) or witness.status(host.database) != "done":
        yield f"the last agent ended with {last.process.returncode}: {last.said[-600:]}"
        return
    with host.store() as store:
        final, known_good = spec_words(store, Role.FINAL), spec_words(store, Role.KNOWN_GOOD)
    if final != known_good:
        yield "final is not known-good"
    if host.listener() is None:
        yield "nobody serves"
    elif words_of(host.argv()) != final:
        yield f"what serves is not the final configuration: {words_of(host.argv())}"
    elif not host.generates():
        yield "what serves does not generate"
    yield from (f"server {start.pid} began while {start.living} lived" for start in host.starts() if start.living)
    yield from witness.disorder(host.database)


def strays(host: Rig) -> list[str]:
    """Processes of the host that nobody needs, once the last watcher had its lease to see that all is well."""
    with contextlib.suppress(AssertionError):
        host.until(lambda: not _left(host))
    return _left(host)


def _left(host: Rig) -> list[str]:
    served = host.listener()
    needed = {served} if served is not None else set()
    needed |= {_leader(folder) for folder in host.jobs().values() if _process(folder, "process") == served}
    return [
        f"process {pid}: {_command(pid)}"
        for pid, ticks in host.ours().items()
        if pid not in needed and start_ticks(pid) == ticks and not _command(pid).startswith(("sshd", "/usr/sbin/sshd"))
    ]


def _leader(folder: Path) -> int:
    return _process(folder, "wrapper") or 0


def _process(folder: Path, name: str) -> int | None:
    path = folder / name
    return int(path.read_text().split()[0]) if path.exists() else None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:160]
    return ""
