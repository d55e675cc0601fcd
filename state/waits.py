"""How much of the time in which launches loaded was used to ask a language model, from the store alone."""

from __future__ import annotations

from typing import NamedTuple

from state.store import Store

WAITING = "waiting"
"""Subject of the notes that say what was done in a wait."""


class Wait(NamedTuple):
    """One launch: how long it took until it generated or failed, and which requests were under way meanwhile."""

    trial_id: str
    seconds: float
    used_s: float
    exchanges: tuple[str, ...]


def waits(store: Store, session_id: str) -> list[Wait]:
    """All launches of a session that are over, in order; the process that was adopted was not waited for."""
    adopted = {trial.id for trial in store.trials(session_id) if trial.adopted or trial.kind != "launch"}
    asked = [row for row in store.rows("exchanges", session_id).values() if row["closed_at"] is not None]
    asked.sort(key=lambda row: int(row["id"][1:]))
    found = []
    for name, trial in store.rows("trials", session_id).items():
        if name in adopted or trial["closed_at"] is None:
            continue
        begun, over = float(trial["opened_at"]), float(trial["closed_at"])
        shares = [(row["id"], min(over, row["closed_at"]) - max(begun, row["opened_at"])) for row in asked]
        beside = [(exchange, share) for exchange, share in shares if share > 0]
        used_s = sum(share for _, share in beside)
        found.append(Wait(name, over - begun, used_s, tuple(exchange for exchange, _ in beside)))
    return sorted(found, key=lambda wait: int(wait.trial_id[1:]))
