"""Where a session stands, as one plain dictionary, from the store alone."""

from __future__ import annotations

from typing import Any

from agent.evidence import open_s, spent
from agent.report import headline
from agent.todo_list import gated
from state.models import DecisionKind, MeasurementStatus, SessionStatus
from state.store import Store


def summary(store: Store, session_id: str) -> dict[str, Any]:
    """Everything that `status` shows. Times in s; `next_step` is what a person would do now."""
    row = store.session(session_id)
    used = spent(store, session_id)
    comparison = store.open_comparison(session_id)
    running = [m.id for m in store.measurements(session_id) if m.status is MeasurementStatus.OPEN]
    return {
        "session": row.id,
        "target": row.target,
        "status": row.status.value,
        "reason": row.reason,
        "exit_code": row.exit_code,
        "agent_pid": row.agent_pid,
        "window": row.config["policy"].get("window"),
        "waits": _waits(store, session_id) if row.status is SessionStatus.RUNNING else None,
        "headline": headline(store, session_id),
        "experiment": comparison.experiment.id if comparison is not None else None,
        "measuring": running[0] if running else None,
        "active_s": round(used.elapsed_s, 1) if row.status is SessionStatus.RUNNING else _until_end(store, session_id),
        "budget_s": row.config["policy"]["budget"]["time_s"],
        "experiments_judged": used.experiments,
        "restarts": used.restarts,
        "downtime_s": round(sum(trial.down_s for trial in store.trials(session_id)), 1),
        "todos": [
            {"id": t.id, "title": t.experiment.title, "status": t.status.value, "priority": t.priority, "why": t.reason}
            for t in store.todos(session_id)
        ],
        "waits_for_approval": [todo.id for todo in gated(store.todos(session_id))],
        "next_step": _NEXT[row.status],
    }


def _waits(store: Store, session_id: str) -> str | None:
    """What it waits for before it begins or goes on; None when it does not."""
    last = store.decisions(session_id)[-1]
    return last["what"] if last["kind"] == DecisionKind.WAIT and not open_s(store, session_id) else None


def _until_end(store: Store, session_id: str) -> float:
    last = store.last_event_at(session_id)
    return round(store.active_s(session_id, last), 1)


_NEXT = {
    SessionStatus.RUNNING: "`stop` ends it with known-good serving; if its agent died, `resume` goes on",
    SessionStatus.STOPPED: "`resume` goes on where it stopped",
    SessionStatus.DONE: "`report` and `replay` tell what happened; `start` begins a new session",
    SessionStatus.REFUSED: "read the reason; `resume` once the cause is gone",
    SessionStatus.NEEDS_HUMAN: "start the known-good server by hand as the reason says, then `resume`",
}
