"""When the evidence turns the search to another topic: pure, by verdicts and the list alone; it measures nothing.

A topic is where time may be lost: communication, computing, memory, scheduling and the like. One experiment that does
nothing says little about it. Two in a row say that the bottleneck is elsewhere, so the rest of the topic waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.chooser import line
from state.models import Experiment, Outcome, Todo, TodoStatus, Verdict

TOPICS = ("communication", "compute", "memory", "scheduling", "launch-overhead", "speculation", "host")
"""Tags that name a bottleneck. An experiment without one of them has its first tag as its topic."""

NOTHING = frozenset({Outcome.NO_DIFFERENCE, Outcome.WORSE, Outcome.COLLAPSED})
"""Outcomes that speak against a topic. What could not be judged speaks neither for nor against it."""

ENOUGH = 2
"""So many of them in a row are evidence."""

TOPIC_SINKS = 0.5
"""What the priorities of the rest are multiplied by, beside what each verdict moves them."""


class Turn(NamedTuple):
    """A change of direction: what is decided, why, on which runs, whose priorities move, what was learned."""

    what: str
    reason: str
    evidence: tuple[str, ...]
    priorities: tuple[tuple[str, float], ...] = ()
    finding: str = ""


def topic_of(experiment: Experiment) -> str | None:
    """Which bottleneck an experiment is about, None when it does not say."""
    return next((tag for tag in experiment.tags if tag in TOPICS), experiment.tags[0] if experiment.tags else None)


def turn(verdict: Verdict, earlier: Mapping[str, Verdict], before: Sequence[Todo], now: Sequence[Todo]) -> Turn | None:
    """The change of direction that a verdict makes, None when it makes none.

    `earlier` are the other verdicts in their order, `before` the whole list as it was before this verdict, `now` what
    waits on it, with the priorities that the verdict moves. Sentinels, observations and the loop's own checks do not
    count, nor does a refinement that does nothing: it asks for more than what worked already, or for several topics at
    once.
    """
    known = {todo.id: todo for todo in before}
    judged = known[verdict.experiment_id].experiment
    topic = topic_of(judged)
    if topic is None or not judged.tries:
        return None
    if verdict.outcome is Outcome.BETTER:
        return _towards(topic, verdict, before, now)
    in_a_row = _in_a_row(topic, [*earlier.values(), verdict], known)
    if verdict.outcome not in NOTHING or _refines(judged) or len(in_a_row) != ENOUGH:
        return None
    return _away(topic, in_a_row, now)


def _in_a_row(topic: str, verdicts: Sequence[Verdict], known: Mapping[str, Todo]) -> list[Verdict]:
    """The topic's newest verdicts that speak against it, oldest first; one that speaks for it ends the row,
    and so does the one by which there are too many.

    What was blocked was not judged by its figures.
    """
    found: list[Verdict] = []
    for verdict in reversed(verdicts):
        todo = known.get(verdict.experiment_id)
        if todo is None or todo.status is TodoStatus.BLOCKED or not todo.experiment.tries:
            continue
        if topic_of(todo.experiment) != topic:
            continue
        if verdict.outcome is Outcome.BETTER:
            break
        if verdict.outcome in NOTHING and not _refines(todo.experiment):
            found.insert(0, verdict)
        if len(found) > ENOUGH:
            break
    return found


def _refines(experiment: Experiment) -> bool:
    return experiment.source.kind == "refinement"


def _away(topic: str, against: Sequence[Verdict], now: Sequence[Todo]) -> Turn | None:
    """The rest of the topic sinks; nothing to decide when nothing is left of it."""
    rest = [todo for todo in line(now) if topic_of(todo.experiment) == topic]
    if not rest:
        return None
    sunk = {todo.id: todo.priority * TOPIC_SINKS for todo in rest}
    moved = [todo.model_copy(update={"priority": sunk[todo.id]}) if todo.id in sunk else todo for todo in now]
    seen = "; ".join(map(_said, against))
    sinking = ", ".join(f"{todo.id} {todo.priority:.2f} → {sunk[todo.id]:.2f}" for todo in rest)
    return Turn(
        what=f"turn away from {topic}; {_next(moved)}",
        reason=f"{topic} is not the bottleneck here: {seen}; the rest of it sinks: {sinking}",
        evidence=tuple(dict.fromkeys(name for verdict in against for name in verdict.evidence)),
        priorities=tuple(sunk.items()),
        finding=f"{topic} is not the bottleneck here: {seen}",
    )


def _towards(topic: str, verdict: Verdict, before: Sequence[Todo], now: Sequence[Todo]) -> Turn | None:
    """A keep lets its relatives rise; a turn only if one of them is first in line now and was not before."""
    was, first = next(iter(line(before)), None), next(iter(line(now)), None)
    if was is None or first is None or topic_of(was.experiment) == topic or topic_of(first.experiment) != topic:
        return None
    return Turn(
        what=f"turn to {topic}; {_next(now)}",
        reason=f"{_said(verdict)}, so what is alike rises; {was.experiment.title} was first in line before",
        evidence=verdict.evidence,
    )


def _next(todos: Sequence[Todo]) -> str:
    first = line(todos)[0]
    return f"first in line is {first.experiment.title} ({topic_of(first.experiment) or 'no topic'})"


def _said(verdict: Verdict) -> str:
    effect = f" ({verdict.objective.percent})" if verdict.objective is not None else ""
    return f"{verdict.experiment_id} {verdict.outcome}{effect}"
