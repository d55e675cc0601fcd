"""What follows from a verdict: decision, statuses, finding and moved priorities, as events; pure, it writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from agent.built_in import missed
from agent.chooser import moved_priorities
from state import events as ev
from state.models import (
    Decision,
    DecisionKind,
    Finding,
    Frozen,
    Outcome,
    Purpose,
    Role,
    Todo,
    TodoStatus,
    Verdict,
)
from state.store import ComparisonRow

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


class Ids(Frozen):
    """The ids that the store allotted to what is about to be written, and the scope in which it was learned."""

    decision: str
    finding: str
    scope: str


def consequences(row: ComparisonRow, verdict: Verdict, todos: Sequence[Todo], ids: Ids) -> list[ev.Event]:
    """All that follows from a verdict, by what the comparison was for."""
    purpose = row.experiment.purpose
    if purpose is Purpose.TRY:
        return after_verdict(row, verdict, todos, ids)
    return AFTER_OWN_CHECK[purpose](row, verdict, ids)


def after_verdict(row: ComparisonRow, verdict: Verdict, todos: Sequence[Todo], ids: Ids) -> list[ev.Event]:
    """Keep, revert, block or void one experiment; its relatives on the list move with it."""
    experiment = row.experiment
    kind, status = CONSEQUENCE[verdict.outcome]
    what = f"{experiment.title}: {verdict.outcome}"
    decision = Decision(
        id=ids.decision,
        kind=kind,
        subject=experiment.id,
        what=what,
        reason=verdict.reason,
        evidence=verdict.evidence,
    )
    happened: list[ev.Event] = [
        ev.VerdictReached(verdict=verdict),
        ev.DecisionMade(decision=decision),
        ev.TodoChanged(experiment_id=experiment.id, status=status, reason=verdict.reason),
    ]
    if kind is DecisionKind.KEEP:
        happened.append(ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=row.candidate, reason=what))
    if verdict.outcome is not Outcome.INVALID:
        happened.append(ev.FindingMade(finding=finding(row, verdict, ids)))
    others = [todo for todo in todos if todo.id != experiment.id]
    for other, priority, reason in moved_priorities(verdict, experiment.tags, others):
        happened.append(ev.TodoChanged(experiment_id=other, priority=priority, reason=reason))
    return happened


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
    changes = ", ".join(map(str, row.experiment.changes)) or row.experiment.title
    points = "; ".join(f"{name} {effect.percent}" for name, effect in sorted(verdict.points.items()))
    statement = f"{changes}: {verdict.outcome} ({points or verdict.reason})"
    return Finding(id=ids.finding, statement=statement, evidence=verdict.evidence, scope=f"{ids.scope}, {row.parent}")
