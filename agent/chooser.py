"""Which ready todo comes next: least disruptive first; pure, and it must not look at the target or the clock."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from pydantic import Field, SkipValidation

from agent.policy import Costs, Price, Spent, forbidden, left_s, needed_disruption, price, unaffordable
from agent.window import spoken
from state.models import Disruption, Experiment, Frozen, JudgeRule, Outcome, Policy, Todo, TodoStatus, Verdict, Workload

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
    used_s: dict[Disruption, float] = Field(
        default_factory=dict, description="time that each level has used so far; read counts as load"
    )


class Choice(Frozen):
    """The todo to take, or None, with the reason, and what was passed over for good with its reasons."""

    todo: Todo | None
    reason: str
    skipped: tuple[tuple[str, str], ...] = ()


def choose(situation: Situation) -> Choice:
    """Take the first ready todo in the order: disruption, tier, priority, gain per minute, id.

    A level that has had its share of the time waits for the next one that has something ready.
    """
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
        return Choice(todo=None, reason=_nothing(situation), skipped=tuple(skipped))
    ready.sort(key=lambda todo: _rank(todo, situation))
    first, passed = _within_shares(ready, situation)
    return Choice(todo=first, reason="; ".join((*passed, _reason(first, ready, situation))), skipped=tuple(skipped))


def _nothing(situation: Situation) -> str:
    left = situation.spent.open_s
    closes = "" if left is None else f"; the window {situation.policy.window} closes in {spoken(left)}"
    return f"nothing on the list is ready and affordable{closes}"


def share_level(experiment: Experiment) -> Disruption:
    """The level in whose share an experiment counts: to observe without load and with it is one."""
    return max(Disruption.LOAD, needed_disruption(experiment))


def _within_shares(ready: Sequence[Todo], situation: Situation) -> tuple[Todo, tuple[str, ...]]:
    """The first todo whose level still has time of its share, and which levels wait for that.

    The highest level with something ready may use all that is left, and no level is denied its first experiment.
    """
    firsts: dict[Disruption, Todo] = {}
    for todo in ready:
        firsts.setdefault(share_level(todo.experiment), todo)
    levels = sorted(firsts)
    passed: list[str] = []
    for level, above in itertools.pairwise(levels):
        waits = _share_used(level, firsts[level], situation)
        if waits is None:
            return firsts[level], tuple(passed)
        passed.append(f"{waits}, so {above.name.lower()} comes first")
    return firsts[levels[-1]], tuple(passed)


def _share_used(level: Disruption, todo: Todo, situation: Situation) -> str | None:
    """Why a level has to let a higher one go first, None while its share lasts."""
    used = situation.used_s.get(level, 0.0)
    left = left_s(situation.policy, situation.spent, situation.workload, situation.rule, situation.costs)
    # What levels above have used was still there when this one had its turn.
    had = left + sum(seconds for of, seconds in situation.used_s.items() if of >= level)
    share, next_s = situation.policy.level_share, cost(todo, situation).seconds
    if not used or used + next_s <= share * had:
        return None
    return (
        f"{level.name.lower()} has used {used / had:.0%} of the {had / 60:.0f} min left at its turn, "
        f"and {next_s / 60:.1f} min more would exceed its share of {share:.0%}"
    )


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


def cost(todo: Todo, situation: Situation) -> Price:
    """What the todo is expected to take of launches and benchmark on this host."""
    return price(todo.experiment, situation.workload, situation.rule, situation.costs)


def line(todos: Sequence[Todo]) -> list[Todo]:
    """Pending todos that change something, in their order but for what they cost: that is nearly alike for all."""
    waiting = [todo for todo in todos if todo.status is TodoStatus.PENDING and todo.experiment.tries]
    return sorted(waiting, key=lambda todo: (*_place(todo), -todo.experiment.hope, todo.id))


def _rank(todo: Todo, situation: Situation) -> tuple[int, int, int, float, float, str]:
    gain = todo.experiment.hope / max(cost(todo, situation).seconds, 1e-6)
    return (*_place(todo), -gain, todo.id)


def _place(todo: Todo) -> tuple[int, int, int, float]:
    disruption = needed_disruption(todo.experiment)
    observes = 0 if disruption <= Disruption.LOAD else 1
    return (observes, int(disruption), todo.experiment.tier, -todo.priority)


def _reason(first: Todo, ready: Sequence[Todo], situation: Situation) -> str:
    disruption = needed_disruption(first.experiment)
    level = [todo for todo in ready if needed_disruption(todo.experiment) == disruption]
    which = "least disruptive" if disruption == needed_disruption(ready[0].experiment) else "next"
    why = f"{which} level with something ready is {disruption.name.lower()}"
    if disruption <= Disruption.LOAD:
        why += ", and an observation blocks nothing"
    if len(level) > 1:
        why += f"; of its {len(level)}: tier {first.experiment.tier}, priority {first.priority:.2f}"
    wanted = cost(first, situation)
    if first.experiment.changes:
        why += f"; hoped gain {first.experiment.expected_gain:.0%} for about {wanted.seconds / 60:.1f} min"
        why += f", {wanted.down_s / 60:.1f} of them without a server" if wanted.down_s else ", all of them served"
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
        if todo.status is not TodoStatus.PENDING:
            continue
        shared = sorted(set(tags) & set(todo.experiment.tags))
        if not shared:
            continue
        priority = min(1.0, todo.priority * factor)
        reason = f"{word}: shares {', '.join(shared)} with {verdict.experiment_id}, which was {verdict.outcome}"
        if priority != todo.priority:
            moved.append((todo.id, priority, reason))
    return moved
