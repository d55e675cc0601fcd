"""What follows from a verdict, as events: decisions, statuses, findings, moved priorities; pure, it writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from agent.brackets import follow_up
from agent.built_in import missed
from agent.chooser import moved_priorities
from agent.direction import turn
from agent.known import Known, Trouble, blamed
from agent.relatives import blocked_with, freed, lost, proven_to_work
from state import events as ev
from state.models import (
    Decision,
    DecisionKind,
    Experiment,
    Finding,
    Frozen,
    Outcome,
    Purpose,
    Role,
    TodoStatus,
    Verdict,
    Who,
)
from state.store import ComparisonRow
from tools.diagnose import Action
from tools.next_step import ADJUSTMENTS, FINAL

CONSEQUENCE: dict[Outcome, tuple[DecisionKind, TodoStatus]] = {
    Outcome.BETTER: (DecisionKind.KEEP, TodoStatus.DONE),
    Outcome.WORSE: (DecisionKind.REVERT, TodoStatus.DONE),
    Outcome.NO_DIFFERENCE: (DecisionKind.REVERT, TodoStatus.DONE),
    Outcome.INCONCLUSIVE: (DecisionKind.REVERT, TodoStatus.DONE),
    Outcome.COLLAPSED: (DecisionKind.REVERT, TodoStatus.DONE),
    Outcome.FAILED: (DecisionKind.BLOCK, TodoStatus.BLOCKED),
    Outcome.INVALID: (DecisionKind.VOID, TodoStatus.SKIPPED),
    Outcome.OBSERVED: (DecisionKind.BASELINE, TodoStatus.DONE),
}


BY_FIGURES = frozenset({DecisionKind.KEEP, DecisionKind.REVERT})
"""Decisions that rest on what was measured, and so say something of an idea and its relatives."""


class Ids(Frozen):
    """The first free ids for what is about to be written, and the scope in which it was learned."""

    decision: str
    finding: str
    scope: str


def consequences(row: ComparisonRow, verdict: Verdict, known: Known, ids: Ids) -> list[ev.Event]:
    """All that follows from a verdict, by what the comparison was for."""
    purpose = row.experiment.purpose
    if purpose is Purpose.TRY:
        return after_verdict(row, verdict, known, ids)
    return AFTER_OWN_CHECK[purpose](row, verdict, ids)


def after_verdict(row: ComparisonRow, verdict: Verdict, known: Known, ids: Ids) -> list[ev.Event]:
    """Keep, revert, block, adjust, skip or void one experiment; its relatives on the list move with it."""
    experiment = row.experiment
    fate = _fate(experiment, verdict, known)
    what = f"{experiment.title}: {verdict.outcome}"
    decision = Decision(
        id=ids.decision,
        kind=fate.kind,
        subject=experiment.id,
        what=what,
        reason="; ".join((verdict.reason, *fate.notes)),
        evidence=verdict.evidence,
    )
    happened: list[ev.Event] = [
        ev.VerdictReached(verdict=verdict),
        ev.DecisionMade(decision=decision),
        ev.TodoChanged(experiment_id=experiment.id, status=fate.status, reason=decision.reason),
    ]
    if fate.kind is DecisionKind.KEEP:
        happened.append(ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=row.candidate, reason=what))
    if verdict.outcome is not Outcome.INVALID:
        found = finding(row, verdict, ids)
        happened.append(ev.FindingMade(finding=found.model_copy(update={"statement": fate.learned or found.statement})))
    if fate.kind in BY_FIGURES:
        happened += _directed(row, verdict, known, ids)
    return [*happened, *fate.others]


class Fate(NamedTuple):
    """What becomes of one experiment: decision, status, more words to its reason, and what happens to others."""

    kind: DecisionKind
    status: TodoStatus
    notes: tuple[str, ...] = ()
    learned: str = ""
    others: tuple[ev.Event, ...] = ()


def _fate(experiment: Experiment, verdict: Verdict, known: Known) -> Fate:
    """By the trouble to which the verdict is due, where it is due to one; else by its outcome."""
    trouble = blamed(known, experiment.id, verdict.outcome)
    if trouble is None:
        kind, status = CONSEQUENCE[verdict.outcome]
        return Fate(kind, status, others=_tried_again(experiment, known) if kind is DecisionKind.KEEP else ())
    if trouble.step in ADJUSTMENTS:
        return _adjusted(experiment, verdict, trouble, known)
    if trouble.step is Action.SKIP or trouble.step in FINAL:
        note = "the setting is not to blame and stays open for another night"
        learned = f"{_changes(experiment)}: could not be tried here ({verdict.reason})"
        return Fate(DecisionKind.SKIP, TodoStatus.SKIPPED, (note,), learned)
    return _blocked(experiment, verdict, trouble, known)


def _adjusted(experiment: Experiment, verdict: Verdict, trouble: Trouble, known: Known) -> Fate:
    """Another value of the knob is tried as an experiment of its own, as long as one is left."""
    follow = follow_up(experiment, trouble, known)
    if follow.experiment is not None:
        note = f"it goes on as {follow.experiment.id}: {follow.bracket.reason}"
        return Fate(DecisionKind.ADJUST, TodoStatus.DONE, (note,), others=(ev.TodoAdded(experiment=follow.experiment),))
    closed = follow.bracket
    note = f"another {follow.knob} does not help: {closed.reason}"
    learned = (
        f"{_changes(experiment)}: {verdict.outcome} ({verdict.reason}); {note} "
        f"(floor {closed.low:g}, ceiling {closed.high:g})"
    )
    return Fate(DecisionKind.BLOCK, TodoStatus.BLOCKED, (note,), learned)


def _blocked(experiment: Experiment, verdict: Verdict, trouble: Trouble, known: Known) -> Fate:
    """Never again for this key, and with it what depends on the same capability."""
    names = lost(experiment, trouble, proven_to_work(known.todos, known.verdicts))
    with_it = blocked_with(names, [todo for todo in known.todos if todo.id != experiment.id])
    cause = f"{experiment.id} {verdict.outcome}, {verdict.reason}"
    others = tuple(
        ev.TodoChanged(
            experiment_id=todo.id,
            status=TodoStatus.BLOCKED,
            reason=f"needs {', '.join(lacks)}, which does not work here: {cause}",
        )
        for todo, lacks in with_it
    )
    named = ", ".join(f"{todo.id} (needs {', '.join(lacks)})" for todo, lacks in with_it)
    return Fate(DecisionKind.BLOCK, TodoStatus.BLOCKED, (f"blocked with it: {named}",) if with_it else (), "", others)


def _tried_again(experiment: Experiment, known: Known) -> tuple[ev.Event, ...]:
    """A block holds for a version of the engine; with another one the question is open again."""
    reason = f"open again: {experiment.id} brings another version than the one that blocked it"
    return tuple(
        ev.TodoChanged(experiment_id=todo.id, status=TodoStatus.PENDING, reason=reason)
        for todo in freed((change.kind for change in experiment.changes), known.todos)
    )


def _directed(row: ComparisonRow, verdict: Verdict, known: Known, ids: Ids) -> Iterator[ev.Event]:
    """What the figures move: the priorities of relatives, and the direction of the search where they turn it."""
    moved = {}
    waiting = [todo for todo in known.todos if todo.status is TodoStatus.PENDING and todo.id != row.experiment.id]
    for name, priority, reason in moved_priorities(verdict, row.experiment.tags, waiting):
        moved[name] = priority
        yield ev.TodoChanged(experiment_id=name, priority=priority, reason=reason)
    earlier = {name: told for name, told in known.verdicts.items() if name != verdict.experiment_id}
    now = [todo.model_copy(update={"priority": moved[todo.id]}) if todo.id in moved else todo for todo in waiting]
    turned = turn(verdict, earlier, known.todos, now)
    if turned is None:
        return
    decision = Decision(
        id=following(ids.decision),
        kind=DecisionKind.PIVOT,
        subject=row.experiment.id,
        what=turned.what,
        reason=turned.reason,
        evidence=turned.evidence,
    )
    yield ev.DecisionMade(decision=decision)
    if turned.finding:
        scope = f"{ids.scope}, {row.parent}"
        learned = Finding(id=following(ids.finding), statement=turned.finding, evidence=turned.evidence, scope=scope)
        yield ev.FindingMade(finding=learned)
    for name, priority in turned.priorities:
        reason = f"sinks: {turned.what} ({decision.id})"
        yield ev.TodoChanged(experiment_id=name, priority=priority, reason=reason, by=Who.PIVOT)


def following(name: str) -> str:
    """The id after this one: `D8` after `D7`."""
    letter, number = name[:1], name[1:]
    return f"{letter}{int(number) + 1}" if number.isdigit() else name


def after_close_out(row: ComparisonRow, verdict: Verdict, ids: Ids) -> list[ev.Event]:
    """The headline; a final configuration that is not shown to be better gives way to the original."""
    better = verdict.outcome is Outcome.BETTER
    objective = verdict.objective.percent if verdict.objective is not None else "unmeasured"
    what = f"final configuration against the original: {objective}"
    decision = Decision(
        id=ids.decision,
        kind=DecisionKind.KEEP if better else DecisionKind.REVERT,
        subject=row.experiment.id,
        what=what,
        reason=verdict.reason if better else f"not shown to be better, so the original returns ({verdict.reason})",
        evidence=verdict.evidence,
    )
    happened: list[ev.Event] = [
        ev.VerdictReached(verdict=verdict),
        ev.DecisionMade(decision=decision),
        ev.TodoChanged(experiment_id=row.experiment.id, status=TodoStatus.DONE, reason=verdict.reason),
        ev.FindingMade(finding=finding(row, verdict, ids)),
    ]
    if not better:
        happened.append(ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=row.parent, reason=what))
    return happened


def after_sentinel(row: ComparisonRow, verdict: Verdict, ids: Ids) -> list[ev.Event]:
    """Nothing changes on the server; a sentinel that looked like a gain is the alarm that stops keeping."""
    alarm = verdict.outcome is Outcome.BETTER
    word = "an unchanged server looked like a gain" if alarm else "an unchanged server shows no gain"
    reason = verdict.reason + ("; both sides now count as launches of the parent, which raises the noise" * alarm)
    decision = Decision(
        id=ids.decision,
        kind=DecisionKind.SENTINEL,
        subject=row.experiment.id,
        what=f"{row.experiment.title}: {word}",
        reason=reason,
        evidence=verdict.evidence,
    )
    return [
        ev.VerdictReached(verdict=verdict),
        ev.DecisionMade(decision=decision),
        ev.TodoChanged(experiment_id=row.experiment.id, status=TodoStatus.DONE, reason=word),
        *([ev.FindingMade(finding=finding(row, verdict, ids))] if alarm else []),
    ]


def after_without(row: ComparisonRow, verdict: Verdict, ids: Ids) -> list[ev.Event]:
    """A kept change stays if leaving it out looked like a loss; else the configuration without it is known-good."""
    stays = missed(verdict)
    name = row.experiment.title.removeprefix("without ")
    what = f"{name} stays" if stays else f"{name} is left out: the others do as well without it"
    decision = Decision(
        id=ids.decision,
        kind=DecisionKind.KEEP if stays else DecisionKind.LEAVE_OUT,
        subject=row.experiment.id,
        what=what,
        reason=verdict.reason,
        evidence=verdict.evidence,
    )
    happened: list[ev.Event] = [
        ev.VerdictReached(verdict=verdict),
        ev.DecisionMade(decision=decision),
        ev.TodoChanged(experiment_id=row.experiment.id, status=TodoStatus.DONE, reason=what),
        ev.FindingMade(finding=finding(row, verdict, ids)),
    ]
    if not stays:
        happened.append(ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=row.candidate, reason=what))
    return happened


AFTER_OWN_CHECK = {
    Purpose.CLOSE_OUT: after_close_out,
    Purpose.SENTINEL: after_sentinel,
    Purpose.WITHOUT: after_without,
}
"""What follows from a comparison that the loop made on its own account."""


def finding(row: ComparisonRow, verdict: Verdict, ids: Ids) -> Finding:
    """What was learned, with the load points at which it was seen and the scope in which it holds."""
    points = "; ".join(f"{name} {effect.percent}" for name, effect in sorted(verdict.points.items()))
    statement = f"{_changes(row.experiment)}: {verdict.outcome} ({points or verdict.reason})"
    return Finding(id=ids.finding, statement=statement, evidence=verdict.evidence, scope=f"{ids.scope}, {row.parent}")


def _changes(experiment: Experiment) -> str:
    return ", ".join(map(str, experiment.changes)) or experiment.title
