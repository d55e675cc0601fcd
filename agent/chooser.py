"""Which ready todo comes next: least disruptive first; pure, and it must not look at the target or the clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import SkipValidation

from agent.policy import Costs, Spent, comparison_s, forbidden, needed_disruption, observation_s, unaffordable
from state.models import Disruption, Frozen, JudgeRule, Outcome, Policy, Todo, TodoStatus, Verdict, Workload

RELATIVE_SINKS = 0.7
RELATIVE_RISES = 1.2


class Situation(Frozen):
    """All that a choice depends on."""

    todos: SkipValidation[tuple[Todo, ...]]
    policy: Policy
    rule: JudgeRule
    workload: Workload
    spent: Spent
    costs: Costs
    blocked_capabilities: frozenset[str] = frozenset()


class Choice(Frozen):
    """The todo to take, or None, with the reason, and what was passed over for good with its reasons."""

    todo: Todo | None
    reason: str
    skipped: tuple[tuple[str, str], ...] = ()


def choose(situation: Situation) -> Choice:
    """Take the first ready todo in the order: disruption, tier, priority, gain per minute, id."""
    ready: list[Todo] = []
    skipped: list[tuple[str, str]] = []
    for todo in situation.todos:
        if todo.status is not TodoStatus.PENDING:
            continue
        obstacle = _obstacle(todo, situation)
        if obstacle is None:
            ready.append(todo)
        else:
            skipped.append((todo.id, obstacle))
    if not ready:
        return Choice(todo=None, reason="nothing on the list is ready and affordable", skipped=tuple(skipped))
    ready.sort(key=lambda todo: _rank(todo, situation))
    return Choice(todo=ready[0], reason=_reason(ready, situation), skipped=tuple(skipped))


def in_order(situation: Situation) -> list[Todo]:
    """All pending todos in the order in which they would be chosen, obstacles aside."""
    pending = [todo for todo in situation.todos if todo.status is TodoStatus.PENDING]
    return sorted(pending, key=lambda todo: _rank(todo, situation))


def _obstacle(todo: Todo, situation: Situation) -> str | None:
    blocked = sorted(set(todo.experiment.needs) & situation.blocked_capabilities)
    if blocked:
        return f"needs {', '.join(blocked)}, which is blocked"
    return forbidden(todo.experiment, situation.policy) or unaffordable(
        todo.experiment, situation.policy, situation.spent, situation.workload, situation.rule, situation.costs
    )


def minutes(todo: Todo, situation: Situation) -> float:
    """Expected minutes of launches and benchmark that the todo costs on this host."""
    price = comparison_s if todo.experiment.changes else observation_s
    return price(situation.workload, situation.rule, situation.costs) / 60


def line(todos: Sequence[Todo]) -> list[Todo]:
    """Pending todos that change something, in their order but for what they cost: that is nearly alike for all."""
    waiting = [todo for todo in todos if todo.status is TodoStatus.PENDING and todo.experiment.tries]
    return sorted(waiting, key=lambda todo: (*_place(todo), -todo.experiment.expected_gain, todo.id))


def _rank(todo: Todo, situation: Situation) -> tuple[int, int, int, float, float, str]:
    gain = todo.experiment.expected_gain / max(minutes(todo, situation), 1e-6)
    return (*_place(todo), -gain, todo.id)


def _place(todo: Todo) -> tuple[int, int, int, float]:
    disruption = needed_disruption(todo.experiment)
    observes = 0 if disruption <= Disruption.LOAD else 1
    return (observes, int(disruption), todo.experiment.tier, -todo.priority)


def _reason(ready: Sequence[Todo], situation: Situation) -> str:
    first = ready[0]
    disruption = needed_disruption(first.experiment)
    level = [todo for todo in ready if needed_disruption(todo.experiment) == disruption]
    why = f"least disruptive level with something ready is {disruption.name.lower()}"
    if disruption <= Disruption.LOAD:
        why += ", and an observation blocks nothing"
    if len(level) > 1:
        why += f"; of its {len(level)}: tier {first.experiment.tier}, priority {first.priority:.2f}"
        why += f", hoped gain {first.experiment.expected_gain:.0%} for about {minutes(first, situation):.1f} min"
    return why


def moved_priorities(verdict: Verdict, tags: Collection[str], todos: Sequence[Todo]) -> list[tuple[str, float, str]]:
    """New priorities for pending relatives of a judged experiment: (id, priority, reason)."""
    if verdict.outcome is Outcome.BETTER:
        factor, word = RELATIVE_RISES, "rises"
    elif verdict.outcome in (Outcome.WORSE, Outcome.NO_DIFFERENCE, Outcome.COLLAPSED):
        factor, word = RELATIVE_SINKS, "sinks"
    else:
        return []
    moved = []
    for todo in todos:
        shared = sorted(set(tags) & set(todo.experiment.tags))
        if todo.status is not TodoStatus.PENDING or not shared:
            continue
        priority = min(1.0, todo.priority * factor)
        reason = f"{word}: shares {', '.join(shared)} with {verdict.experiment_id}, which was {verdict.outcome}"
        if priority != todo.priority:
            moved.append((todo.id, priority, reason))
    return moved
