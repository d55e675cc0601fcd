"""How each event changes the tables; pure functions of one event on a database, no clock and no other input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sqlite_utils import Database

from state import events as ev
from state.models import Frozen, Role, SessionStatus, TodoStatus

ENDED = {SessionStatus.DONE, SessionStatus.REFUSED, SessionStatus.NEEDS_HUMAN}
TABLES = (
    "sessions",
    "specs",
    "roles",
    "todos",
    "effects",
    "trials",
    "measurements",
    "verdicts",
    "decisions",
    "findings",
    "exchanges",
)


def project(db: Database, session_id: str, at: float, event: ev.Event) -> None:
    """Apply one event to the tables. Called in the transaction that inserts the event, and by `fold`."""
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        handler(db, session_id, at, event)


def fold(db: Database) -> Database:
    """A fresh in-memory database whose tables are the fold of `db`'s events; equal to `db`'s own tables."""
    fresh = Database(memory=True)
    for row in db.query("SELECT sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
        fresh.execute(row["sql"])
    for row in db.query("SELECT * FROM events ORDER BY seq"):
        project(fresh, row["session_id"], row["at"], ev.EVENT.validate_json(row["body"]))
    return fresh


def _json(value: Frozen) -> str:
    return value.model_dump_json()


def _session_opened(db: Database, session_id: str, at: float, event: ev.SessionOpened) -> None:
    db.table("sessions").insert(
        {
            "id": session_id,
            "target": event.target,
            "status": SessionStatus.RUNNING.value,
            "reason": "",
            "exit_code": None,
            "started_at": at,
            "ended_at": None,
            "epoch": 0,
            "config": json.dumps(event.config),
            "config_revision": event.config_revision,
            "workload_revision": event.workload_revision,
            "adoption": _json(event.adoption),
            "agent_pid": None,
            "attached": 0,
        }
    )


def _session_moved(db: Database, session_id: str, at: float, event: ev.SessionMoved) -> None:
    db.table("sessions").update(
        session_id,
        {
            "status": event.status.value,
            "reason": event.reason,
            "exit_code": event.exit_code,
            "ended_at": at if event.status in ENDED else None,
        },
    )


def _agent_attached(db: Database, session_id: str, at: float, event: ev.AgentAttached) -> None:
    db.execute("UPDATE sessions SET agent_pid = ?, attached = attached + 1 WHERE id = ?", [event.pid, session_id])


def _spec_seen(db: Database, session_id: str, at: float, event: ev.SpecSeen) -> None:
    db.table("specs").insert({"fingerprint": event.fingerprint, "body": _json(event.spec)}, ignore=True)


def _role_set(db: Database, session_id: str, at: float, event: ev.RoleSet) -> None:
    before = db.table("roles").rows_where(
        "session_id = ? AND role = ?", [session_id, event.role.value], select="fingerprint"
    )
    changed = [row["fingerprint"] for row in before] not in ([], [event.fingerprint])
    row = {"role": event.role.value, "fingerprint": event.fingerprint, "reason": event.reason, "at": at}
    db.table("roles").insert({"session_id": session_id, **row}, pk=("session_id", "role"), replace=True)
    if event.role is Role.KNOWN_GOOD and changed:
        db.execute("UPDATE sessions SET epoch = epoch + 1 WHERE id = ?", [session_id])


def _todo_added(db: Database, session_id: str, at: float, event: ev.TodoAdded) -> None:
    count = db.execute("SELECT count(*) FROM todos WHERE session_id = ?", [session_id]).fetchone()[0]
    db.table("todos").insert(
        {
            "session_id": session_id,
            "id": event.experiment.id,
            "position": count + 1,
            "status": event.status.value,
            "priority": event.experiment.priority,
            "reason": event.reason,
            "identity": "",
            "parent": None,
            "candidate": None,
            "epoch": None,
            "body": _json(event.experiment),
        }
    )


def _todo_changed(db: Database, session_id: str, at: float, event: ev.TodoChanged) -> None:
    changes: dict[str, Any] = {"reason": event.reason}
    if event.status is not None:
        changes["status"] = event.status.value
    if event.priority is not None:
        changes["priority"] = event.priority
    if event.identity is not None:
        changes["identity"] = event.identity
    db.table("todos").update((session_id, event.experiment_id), changes)


def _comparison_opened(db: Database, session_id: str, at: float, event: ev.ComparisonOpened) -> None:
    epoch = db.execute("SELECT epoch FROM sessions WHERE id = ?", [session_id]).fetchone()[0]
    changes = {
        "parent": event.parent,
        "candidate": event.candidate,
        "epoch": epoch,
        "status": TodoStatus.IN_PROGRESS.value,
    }
    db.table("todos").update((session_id, event.experiment_id), changes)


def _effect_intended(db: Database, session_id: str, at: float, event: ev.EffectIntended) -> None:
    row = {"key": event.key, "session_id": session_id, "intent": json.dumps(event.intent), "intended_at": at}
    db.table("effects").insert({**row, "closed_by": None, "outcome": None, "closed_at": None})


def _effect_closed(db: Database, session_id: str, at: float, event: ev.EffectClosed) -> None:
    db.table("effects").update(
        event.key, {"closed_by": event.by, "outcome": json.dumps(event.outcome), "closed_at": at}
    )


def _trial_opened(db: Database, session_id: str, at: float, event: ev.TrialOpened) -> None:
    trial = event.trial
    db.table("trials").insert(
        {
            "id": trial.id,
            "session_id": session_id,
            "experiment_id": trial.experiment_id,
            "status": trial.status.value,
            "fingerprint": trial.fingerprint,
            "opened_at": at,
            "closed_at": None,
            "body": _json(trial),
        }
    )


def _trial_closed(db: Database, session_id: str, at: float, event: ev.TrialClosed) -> None:
    trial = event.trial
    db.table("trials").update(trial.id, {"status": trial.status.value, "closed_at": at, "body": _json(trial)})


def _measurement_opened(db: Database, session_id: str, at: float, event: ev.MeasurementOpened) -> None:
    taken = event.measurement
    db.table("measurements").insert(
        {
            "id": taken.id,
            "session_id": session_id,
            "experiment_id": taken.experiment_id,
            "trial_id": taken.trial_id,
            "arm": taken.arm.value,
            "load_point": taken.load_point,
            "status": taken.status.value,
            "opened_at": at,
            "closed_at": None,
            "body": _json(taken),
            "raw": None,
            "answers": None,
        }
    )


def _measurement_closed(db: Database, session_id: str, at: float, event: ev.MeasurementClosed) -> None:
    taken = event.measurement
    raw = json.dumps(event.raw) if event.raw is not None else None
    answers = json.dumps([one.model_dump(mode="json") for one in event.answers]) if event.answers else None
    db.table("measurements").update(
        taken.id,
        {"status": taken.status.value, "closed_at": at, "body": _json(taken), "raw": raw, "answers": answers},
    )


def _verdict_reached(db: Database, session_id: str, at: float, event: ev.VerdictReached) -> None:
    verdict = event.verdict
    db.table("verdicts").insert(
        {
            "session_id": session_id,
            "experiment_id": verdict.experiment_id,
            "outcome": verdict.outcome.value,
            "at": at,
            "body": _json(verdict),
        },
        pk=("session_id", "experiment_id"),
        replace=True,
    )


def _decision_made(db: Database, session_id: str, at: float, event: ev.DecisionMade) -> None:
    made = event.decision
    db.table("decisions").insert(
        {
            "id": made.id,
            "session_id": session_id,
            "kind": made.kind.value,
            "subject": made.subject,
            "what": made.what,
            "reason": made.reason,
            "evidence": json.dumps(list(made.evidence)),
            "at": at,
        }
    )


def _finding_made(db: Database, session_id: str, at: float, event: ev.FindingMade) -> None:
    found = event.finding
    row = {"id": found.id, "statement": found.statement, "scope": found.scope, "at": at}
    db.table("findings").insert({**row, "session_id": session_id, "evidence": json.dumps(list(found.evidence))})


def _exchange_opened(db: Database, session_id: str, at: float, event: ev.ExchangeOpened) -> None:
    ask = event.ask
    row = {"id": ask.id, "session_id": session_id, "round": ask.round, "opened_at": at, "ask": _json(ask)}
    db.table("exchanges").insert({**row, "closed_at": None, "reply": None})


def _exchange_closed(db: Database, session_id: str, at: float, event: ev.ExchangeClosed) -> None:
    db.table("exchanges").update(event.exchange_id, {"closed_at": at, "reply": _json(event.reply)})


_HANDLERS: dict[type[Frozen], Callable[[Database, str, float, Any], None]] = {
    ev.SessionOpened: _session_opened,
    ev.SessionMoved: _session_moved,
    ev.AgentAttached: _agent_attached,
    ev.SpecSeen: _spec_seen,
    ev.RoleSet: _role_set,
    ev.TodoAdded: _todo_added,
    ev.TodoChanged: _todo_changed,
    ev.ComparisonOpened: _comparison_opened,
    ev.EffectIntended: _effect_intended,
    ev.EffectClosed: _effect_closed,
    ev.TrialOpened: _trial_opened,
    ev.TrialClosed: _trial_closed,
    ev.MeasurementOpened: _measurement_opened,
    ev.MeasurementClosed: _measurement_closed,
    ev.VerdictReached: _verdict_reached,
    ev.DecisionMade: _decision_made,
    ev.FindingMade: _finding_made,
    ev.ExchangeOpened: _exchange_opened,
    ev.ExchangeClosed: _exchange_closed,
}
