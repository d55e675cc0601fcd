"""The list as persons and programs see it: how a todo gets on it, what stands there, and the history of each.

It reads the store and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.chooser import cost, in_order
from agent.config import SessionConfig
from agent.evidence import situation
from agent.inbox import waiting
from agent.policy import Admission, admission, needed_disruption
from state import events as ev
from state.errors import ConfigError
from state.models import Experiment, Policy, Todo, TodoStatus
from state.store import Store

CARRY_OVER = "carry-over"
"""Who put a todo on the list that stood on an earlier session's."""
_FIRST = (TodoStatus.IN_PROGRESS, TodoStatus.PENDING, TodoStatus.GATED)


def on_the_list(experiment: Experiment, policy: Policy) -> ev.TodoAdded:
    """An experiment as it goes on the list: pending, waiting for a person, or skipped as the session file wants."""
    admitted: Admission = admission(experiment, policy)
    return ev.TodoAdded(experiment=experiment, status=admitted.status, reason=admitted.reason)


def gated(todos: Sequence[Todo]) -> list[Todo]:
    """What waits for a person's approval."""
    return [todo for todo in todos if todo.status is TodoStatus.GATED]


def never_approved(todos: Sequence[Todo]) -> str:
    """What the last decision says of todos that nobody approved; empty without any."""
    names = ", ".join(todo.id for todo in gated(todos))
    return f"; never approved, so not tried: {names}" if names else ""


def listing(store: Store, session_id: str) -> dict[str, Any]:
    """The whole list: what is under way, then what comes next in its order, what waits for approval, and the rest."""
    row = store.session(session_id)
    now = situation(store, session_id, SessionConfig.model_validate(row.config))
    todos = store.todos(session_id)
    turn = {todo.id: number for number, todo in enumerate(in_order(now), 1)}
    places = {todo.id: place for place, todo in enumerate(todos)}

    def place(todo: Todo) -> tuple[int, int]:
        group = _FIRST.index(todo.status) if todo.status in _FIRST else len(_FIRST)
        return group, turn.get(todo.id, places[todo.id])

    return {
        "session": row.id,
        "status": row.status.value,
        "todos": [
            _line(todo, turn.get(todo.id), round(cost(todo, now).seconds / 60, 1)) for todo in sorted(todos, key=place)
        ],
        "waiting": [str(word) for word in waiting(store.path, session_id)],
    }


def _line(todo: Todo, turn: int | None, cost_min: float) -> dict[str, Any]:
    experiment = todo.experiment
    return {
        "id": todo.id,
        "title": experiment.title,
        "status": todo.status.value,
        "turn": turn,
        "source": experiment.source.kind,
        "changes": [str(change) for change in experiment.changes],
        "disruption": needed_disruption(experiment).name.lower(),
        "tier": experiment.tier,
        "priority": round(todo.priority, 4),
        "expected_gain": experiment.expected_gain,
        "confidence": experiment.confidence,
        "cost_min": cost_min,
        "risk": experiment.risk,
        "needs": list(experiment.needs),
        "tags": list(experiment.tags),
        "why": todo.reason,
    }


def history(store: Store, session_id: str, todo_id: str) -> list[dict[str, Any]]:
    """Every change of mind about a todo, from the session in which it first stood on a list."""
    own = store.todo_history(session_id, todo_id)
    carried = store.carried_over(session_id)
    if carried is None or not own or own[0]["who"] != CARRY_OVER:
        return own
    return [*history(store, carried.origin, todo_id), *own]


def shown(store: Store, session_id: str, todo_id: str) -> dict[str, Any]:
    """One todo with its history. Raises ConfigError, naming the ids that there are."""
    lines = {line["id"]: line for line in listing(store, session_id)["todos"]}
    if todo_id not in lines:
        raise unknown(todo_id, lines)
    todo = next(one for one in store.todos(session_id) if one.id == todo_id)
    return {
        **lines[todo_id],
        "hypothesis": todo.experiment.hypothesis,
        "source_ref": todo.experiment.source.ref,
        "history": history(store, session_id, todo_id),
    }


def unknown(todo_id: str, known: Sequence[str] | dict[str, Any]) -> ConfigError:
    """The mistake of naming a todo that is not on the list."""
    return ConfigError(f"there is no todo {todo_id}", do=f"todos here: {', '.join(known) or 'none yet'}")
