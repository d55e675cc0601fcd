"""The comparisons that the loop makes on its own account: baseline, sentinels, leaving one out, final comparison.

Reads the store and says which is due; it measures nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent.config import SessionConfig
from agent.evidence import BASELINE, CLOSE_OUT, costs, fresh, spent
from agent.policy import no_room_for, no_room_for_the_end
from state.models import Disruption, Experiment, LoadHint, Outcome, Purpose, Role, Source, Todo, Verdict
from state.store import Store
from state.tables import PURPOSE, VERDICTS

SENTINEL_WINS = 3
"""Sentinels in a row that looked like gains, after which nothing on this host can be judged."""


class Due(NamedTuple):
    """A check that should come next, why, and what stands against it (None: it can begin)."""

    experiment: Experiment
    reason: str
    obstacle: str | None


def baseline_experiment() -> Experiment:
    """What runs now, before anything is changed."""
    return Experiment(
        id=BASELINE,
        title="baseline",
        hypothesis="what runs now, measured often enough to know its noise",
        priority=1.0,
        disruption=Disruption.LOAD,
        load_hint=LoadHint.ANY,
        source=Source(kind="built-in"),
    )


def close_out_experiment(store: Store, session_id: str) -> Experiment:
    """The comparison that makes the headline; its answers must be compared if those of a kept change had to be."""
    return Experiment(
        id=CLOSE_OUT,
        title="final configuration against the original",
        hypothesis="what was kept is better than what was found",
        priority=1.0,
        purpose=Purpose.CLOSE_OUT,
        numerics=any(todo.experiment.numerics for todo, _ in kept(store, session_id)),
        source=Source(kind="built-in"),
    )


# --- sentinels ---------------------------------------------------------------------------------------------


def sentinel_experiment(number: int) -> Experiment:
    """A comparison of the unchanged server with itself."""
    return Experiment(
        id=f"sentinel-{number}",
        title=f"A/A sentinel {number}",
        hypothesis="the unchanged server shows no gain over itself",
        purpose=Purpose.SENTINEL,
        source=Source(kind="built-in"),
    )


def sentinels(store: Store, session_id: str) -> list[Verdict]:
    """Verdicts of the A/A checks so far, oldest first."""

    def passed() -> list[Verdict]:
        verdicts = store.verdicts(session_id)
        listed = store.todos(session_id, (PURPOSE, Purpose.SENTINEL))
        return [verdicts[todo.id] for todo in listed if todo.id in verdicts]

    return store.derived(session_id, "sentinels", (VERDICTS,), passed)


def sentinels_won(store: Store, session_id: str) -> int:
    """How many of the newest sentinels in a row looked like a gain."""
    won = 0
    for verdict in reversed(sentinels(store, session_id)):
        if verdict.outcome is not Outcome.BETTER:
            break
        won += 1
    return won


def sentinel_due(store: Store, session_id: str, config: SessionConfig) -> Due | None:
    """The next comparison of the unchanged parent with itself, None while none is due.

    In its turn it waits for a launch of the parent that happens anyway. After one that looked like a gain the next one
    comes at once: nothing is kept before one passes.
    """
    every = config.judge.sentinel_every
    if not every or config.policy.max_disruption < Disruption.RESTART:
        return None
    passed = sentinels(store, session_id)
    if sentinels_won(store, session_id):
        reason = f"{passed[-1].experiment_id} showed a gain of an unchanged server; nothing is kept until one passes"
    else:
        judged = _judged_since_sentinel(store, session_id)
        parent = store.role(session_id, Role.KNOWN_GOOD)
        trials = store.trials(session_id)
        if (
            judged < every
            or parent is None
            or not fresh(trials, lambda name: _measured(store, session_id, name), parent)
        ):
            return None
        reason = f"{judged} experiments were judged since the last one, and the parent was launched anew just now"
    experiment = sentinel_experiment(len(passed) + 1)
    return Due(experiment, reason, _obstacle(store, session_id, config, config.judge.min_blocks))


def _judged_since_sentinel(store: Store, session_id: str) -> int:
    judged = 0
    for name in reversed(store.verdicts(session_id)):
        todo = store.todo(session_id, name)
        assert todo is not None, "what is judged is on the list"
        if todo.experiment.purpose is Purpose.SENTINEL:
            break
        judged += todo.experiment.tries
    return judged


def _measured(store: Store, session_id: str, launch: str) -> bool:
    return bool(store.measured_on(session_id, launch))


# --- leaving one out ---------------------------------------------------------------------------------------


def kept(store: Store, session_id: str) -> list[tuple[Todo, Verdict]]:
    """The kept changes that still stand, in the order of their keeps, each with the verdict that kept it."""
    verdicts = store.verdicts(session_id)
    todos = {todo.id: todo for todo in store.todos(session_id)}
    return [
        (todos[name], verdict)
        for name, verdict in verdicts.items()
        if todos[name].experiment.tries and verdict.outcome is Outcome.BETTER and not _went(name, verdicts)
    ]


def without(experiment_id: str) -> str:
    """Id of the experiment that leaves a kept change out."""
    return f"without-{experiment_id}"


def missed(verdict: Verdict) -> bool:
    """Whether leaving the change out looked like a loss, or could not be measured to the end: then it stays."""
    return verdict.outcome not in (Outcome.BETTER, Outcome.NO_DIFFERENCE)


def _went(experiment_id: str, verdicts: Mapping[str, Verdict]) -> bool:
    told = verdicts.get(without(experiment_id))
    return told is not None and not missed(told)


def leave_out_due(store: Store, session_id: str, config: SessionConfig) -> tuple[Todo, Due] | None:
    """The kept change that should be left out next, weakest first; None with fewer than two, or when all were.

    With one kept change the final comparison is the same question.
    """
    standing = kept(store, session_id)
    known = {todo.id for todo in store.todos(session_id)}
    open_ones = [
        (verdict.objective.estimate if verdict.objective is not None else 0.0, todo)
        for todo, verdict in standing
        if without(todo.id) not in known
    ]
    if len(standing) < 2 or not open_ones:
        return None
    _, weakest = min(open_ones, key=lambda pair: (pair[0], pair[1].id))
    experiment = Experiment(
        id=without(weakest.id),
        title=f"without {weakest.experiment.title}",
        hypothesis="the final configuration needs every change that was kept",
        purpose=Purpose.WITHOUT,
        source=Source(kind="built-in"),
    )
    reason = f"of {len(standing)} kept changes it seemed to gain least; each must still be worth it beside the others"
    return weakest, Due(experiment, reason, _obstacle(store, session_id, config, config.judge.close_out_blocks))


def no_room_for_close_out(store: Store, session_id: str, config: SessionConfig) -> str | None:
    """Why the final comparison would not end before the window closes; None where it would, or none is kept."""
    prices = costs(store, session_id, config)
    return no_room_for_the_end(spent(store, session_id), config.workload, config.judge, prices)


def _obstacle(store: Store, session_id: str, config: SessionConfig, blocks: int) -> str | None:
    return no_room_for(
        blocks,
        config.policy,
        spent(store, session_id),
        config.workload,
        config.judge,
        costs(store, session_id, config),
    )
