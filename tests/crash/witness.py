"""What a session left behind, read from outside with plain sqlite3, JSON and procfs; it must not ask Ratchet.

The exceptions are `unfolded` and `unproven`, which are about Ratchet's own tables and verdicts.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from agent.verify import Result, verify
from state.projection import TABLES, fold
from state.store import Store
from tests.state.test_store import dump

Event = tuple[Any, ...]


def ask(database: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of a database that nobody writes just now."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()


def committed(database: Path) -> list[Event]:
    """Every event that is in the database, in order."""
    return ask(database, "SELECT seq, session_id, at, kind, body FROM events ORDER BY seq")


def lost(before: list[Event], after: list[Event]) -> tuple[str, ...]:
    """Events that were committed and are missing or changed: the log may only grow at its end."""
    kept = [*after, *[()] * len(before)]
    return tuple(f"event {old[0]} ({old[3]})" for old, new in zip(before, kept, strict=False) if old != new)


def status(database: Path) -> str:
    """The word for how the session stands."""
    return str(ask(database, "SELECT status FROM sessions")[-1][0])


def roles(database: Path) -> dict[str, str]:
    """Fingerprint by role."""
    return dict(ask(database, "SELECT role, fingerprint FROM roles"))


def spec(database: Path, fingerprint: str) -> dict[str, Any]:
    """The body of a spec."""
    bodies: dict[str, str] = dict(ask(database, "SELECT fingerprint, body FROM specs"))
    found: dict[str, Any] = json.loads(bodies[fingerprint])
    return found


def outcomes(database: Path) -> dict[str, str]:
    """Outcome by experiment."""
    return {
        json.loads(body)["experiment_id"]: json.loads(body)["outcome"]
        for (body,) in ask(database, "SELECT body FROM verdicts")
    }


def todos(database: Path) -> dict[str, tuple[str, float]]:
    """Status and priority of each todo, as far as chance cannot move it."""
    return {
        name: (status, round(at, 2)) for name, status, at in ask(database, "SELECT id, status, priority FROM todos")
    }


def decided(database: Path) -> Counter[tuple[str, str]]:
    """How often each subject was decided on, by kinds of decisions that no disturbance adds to."""
    query = "SELECT kind, subject FROM decisions WHERE kind IN ('choose', 'keep', 'person', 'refine')"
    return Counter(ask(database, query))


def runs(database: Path) -> list[tuple[Any, ...]]:
    """Every run of a launch with its session, that launch, and whether it was the adopted process."""
    query = "SELECT m.id, m.session_id, m.trial_id, json_extract(t.body, '$.adopted') FROM measurements m "
    query += "JOIN trials t ON t.id = m.trial_id "
    return ask(database, query + "WHERE coalesce(json_extract(t.body, '$.kind'), 'launch') = 'launch'")


def intended(database: Path) -> set[str]:
    """Keys of all effects as the host knows them: `SESSION-T7` for `SESSION/T7/launch`."""
    keys = [key for (key,) in ask(database, "SELECT key FROM effects")]
    return {"-".join(key.split("/")[:2]) for key in keys}


def disorder(database: Path) -> list[str]:
    """What must not be in the database of a session that has ended, however often it died."""
    wrong = [
        f"effect {key} has no outcome" for (key,) in ask(database, "SELECT key FROM effects WHERE outcome IS NULL")
    ]
    wrong += [f"launch {key} is open" for (key,) in ask(database, "SELECT id FROM trials WHERE status = 'open'")]
    taken = [json.loads(body) for (body,) in ask(database, "SELECT body FROM measurements")]
    wrong += [f"run {one['id']} is open" for one in taken if one["status"] == "open"]
    cells = Counter(
        (one["experiment_id"], one["arm"], one["block"], one["run"], one["load_point"])
        for one in taken
        if one["status"] == "valid"
    )
    wrong += [f"measured {count} times: {cell}" for cell, count in cells.items() if count > 1]
    numbers = [int(key[1:]) for (key,) in ask(database, "SELECT id FROM decisions")]
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        wrong.append(f"decisions have gaps: {sorted(numbers)}")
    return wrong + unfolded(database) + unproven(database)


def unfolded(database: Path) -> list[str]:
    """Tables that are not what the events say."""
    with Store.read(database) as store:
        again = fold(store.db)
        wrong = [
            f"table {name} is not what its events say" for name in TABLES if dump(again, name) != dump(store.db, name)
        ]
        again.close()
    return wrong


def unproven(database: Path) -> list[str]:
    """What `replay --verify` would not call the same."""
    with Store.read(database) as store:
        checks = [check for row in store.sessions() for check in verify(store, row.id).checks]
    return [
        f"{check.kind} {check.subject} is {check.result}: {check.why} {'; '.join(map(str, check.differences))}"
        for check in checks
        if check.result is not Result.SAME
    ]


def session_of(pid: int) -> int | None:
    """The session (as of setsid) of a living process, None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[3])


def members(session: int) -> list[int]:
    """Living processes of a session."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if session_of(int(path.name)) == session]
