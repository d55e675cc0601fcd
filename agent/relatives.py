"""What a crash takes from the rest of the list: experiments that depend on the same thing; pure, and it never guesses.

A block holds for the configuration, the engine's version and the hardware that showed it. So it ends with a session,
and in a session when a kept change brings another version of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.known import Known, Trouble, blamed
from state.models import Experiment, Outcome, Todo, TodoStatus, Verdict
from tools.diagnose import FailureClass, rule_named

SHOW_A_LACK = frozenset(
    {
        FailureClass.UNSUPPORTED_HW,
        FailureClass.CRASH_AT_LOAD,
        FailureClass.CRASH_WHILE_SERVING,
        FailureClass.HANG,
        FailureClass.NUMERICS,
    }
)
"""Classes that speak of a capability. A refused value speaks of that value, lack of memory of sizes, and what no rule
explains of nothing: with these only what names the very experiment is blocked."""

RAN = frozenset(
    {Outcome.BETTER, Outcome.WORSE, Outcome.NO_DIFFERENCE, Outcome.INCONCLUSIVE, Outcome.COLLAPSED, Outcome.INVALID}
)
NEW_VERSION = frozenset({"package", "checkout"})
"""Kinds of changes that bring another version of the engine."""


def lost(experiment: Experiment, trouble: Trouble, proven: frozenset[str]) -> frozenset[str]:
    """What is not to be had after a rejected experiment: itself, and the capability that the failure is about.

    The rule that explains the failure may name it. Else it is what the experiment is about, the first of its needs:
    the others are what it stands on, and whether these work was not asked. What makes several settings together is
    about no single one. What is proven to work is never lost.
    """
    rule = rule_named(trouble.failure.rule)
    if rule is not None and rule.capability:
        return frozenset({experiment.id, rule.capability})
    if trouble.failure.failure_class not in SHOW_A_LACK:
        return frozenset({experiment.id})
    several = experiment.source.kind == "refinement" and len(experiment.changes) > 1
    about = () if several else experiment.needs[:1]
    return frozenset({experiment.id, *about}) - proven


def proven_to_work(todos: Iterable[Todo], verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """Capabilities needed by an experiment of this session that came up and was not blocked afterwards."""
    return frozenset(
        need
        for todo in todos
        if todo.id in verdicts and verdicts[todo.id].outcome in RAN and todo.status is not TodoStatus.BLOCKED
        for need in todo.experiment.needs
    )


def blocked_with(names: frozenset[str], todos: Iterable[Todo]) -> list[tuple[Todo, tuple[str, ...]]]:
    """Pending todos that need something lost, and what depends on those in turn; each with what it lacks."""
    waiting = [todo for todo in todos if todo.status is TodoStatus.PENDING]
    found: list[tuple[Todo, tuple[str, ...]]] = []
    while True:
        more = [todo for todo in waiting if names & {*todo.experiment.needs}]
        if not more:
            return found
        found += [(todo, tuple(sorted(names & {*todo.experiment.needs}))) for todo in more]
        names |= {todo.id for todo in more}
        waiting = [todo for todo in waiting if todo not in more]


def all_lost(known: Known) -> frozenset[str]:
    """Everything that is not to be had now, by all that is blocked on the list; for todos that come later."""
    return frozenset(name for names in lost_with(known).values() for name in names)


def lost_with(known: Known) -> dict[str, frozenset[str]]:
    """What each blocked todo shows to be missing: itself, and the capability that its failure is about."""
    found: dict[str, frozenset[str]] = {}
    proven = proven_to_work(known.todos, known.verdicts)
    for todo in known.todos:
        if todo.status is not TodoStatus.BLOCKED:
            continue
        verdict = known.verdicts.get(todo.id)
        trouble = None if verdict is None else blamed(known, todo.id, verdict.outcome)
        before = known.lost_before.get(todo.id, ())
        names = before if trouble is None else lost(todo.experiment, trouble, proven)
        found[todo.id] = frozenset({todo.id, *names})
    return found


def freed(kept: Iterable[str], todos: Iterable[Todo]) -> list[Todo]:
    """What may be tried again after a keep of these kinds of changes: all that was blocked, with a new version."""
    if not NEW_VERSION & {*kept}:
        return []
    return [todo for todo in todos if todo.status is TodoStatus.BLOCKED]
