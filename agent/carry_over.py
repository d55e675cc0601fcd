"""What comes over from an earlier session on the same target: its list, its findings, and what was blocked; pure.

What was tried counts as tried only where the very same would come of it: full configuration, method, version of the
engine and hardware. Everything else has another turn, and the reason says on what new ground.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from agent.config_checks import RESERVED
from agent.decisions import Ids, following
from agent.identity import identity
from agent.known import Known
from agent.policy import admission
from agent.relatives import lost_with
from state import events as ev
from state.models import (
    Adoption,
    Change,
    Decision,
    DecisionKind,
    Experiment,
    Finding,
    Frozen,
    Outcome,
    Policy,
    Purpose,
    Todo,
    TodoStatus,
    Who,
)

WouldBe = Callable[[tuple[Change, ...]], str | None]
"""Fingerprint of what runs now with some changes; None where they cannot be made."""
FOUND_IN = "found in session"


class Earlier(Frozen):
    """The session that is continued: what it knew, what it learned, and on what ground it stood.

    `known_good` is the configuration that it left, by fingerprint; `movers` who changed each todo's status, in order,
    with the status.
    """

    id: str
    known: Known
    findings: tuple[Finding, ...]
    workload_revision: str
    adoption: Adoption
    known_good: str
    movers: dict[str, tuple[tuple[Who, TodoStatus], ...]]


class Ground(NamedTuple):
    """Where the new session begins."""

    workload_revision: str
    adoption: Adoption
    policy: Policy
    own: Mapping[str, Experiment]
    """Experiments of the new session file, by id."""
    would_be: WouldBe


class Place(NamedTuple):
    """Where a todo of the earlier list goes on the new one, and why; None leaves it out.

    `label` is for the sum of all; `by` is who decided it in the earlier session, where that goes on to hold.
    """

    status: TodoStatus | None
    reason: str
    label: str
    identity: str = ""
    by: Who | None = None


def carried_over(earlier: Earlier, ground: Ground, ids: Ids) -> list[ev.Event]:
    """Everything that comes over, as the new session's first events, with the decision that says so."""
    todos = [todo for todo in earlier.known.todos if _on_its_own(todo)]
    places = {todo.id: _place(todo, earlier, ground) for todo in todos}
    lost = lost_with(earlier.known)
    happened: list[ev.Event] = []
    for todo in todos:
        happened += _listed(todo, places[todo.id], earlier.id)
    findings = _findings(earlier, ids.finding)
    blocked = {
        name: tuple(sorted(lost.get(name, ()))) for name, place in places.items() if place.status is TodoStatus.BLOCKED
    }
    labels = Counter(place.label for place in places.values())
    left_out = [f"{name}: {place.reason}" for name, place in places.items() if place.status is None]
    told = [f"{count} {label}" for label, count in labels.items()] + [f"{len(findings)} findings"]
    decision = Decision(
        id=ids.decision,
        kind=DecisionKind.CARRY,
        subject=earlier.id,
        what=f"goes on with the list of session {earlier.id}",
        reason=", ".join(told) + (f"; left out: {'; '.join(left_out)}" if left_out else ""),
    )
    listed = tuple(name for name, place in places.items() if place.status is not None)
    carried = ev.CarriedOver(origin=earlier.id, todos=listed, lost=blocked)
    return [carried, *happened, *(ev.FindingMade(finding=one) for one in findings), ev.DecisionMade(decision=decision)]


# --- where each goes ---------------------------------------------------------------------------------------


def _on_its_own(todo: Todo) -> bool:
    """Whether it is no check that every session makes for itself."""
    return todo.experiment.purpose is Purpose.TRY and todo.id not in RESERVED


def _place(todo: Todo, earlier: Earlier, ground: Ground) -> Place:
    if ground.adoption.spec.engine != earlier.adoption.spec.engine:
        return Place(None, f"the engine is {ground.adoption.spec.engine} now", "of another engine")
    written = ground.own.get(todo.id)
    if written is not None and written.changes != todo.experiment.changes:
        return Place(None, "the session file has another experiment of that name", "written anew in the session file")
    if todo.status is TodoStatus.BLOCKED:
        return _blocked(todo, earlier, ground)
    if todo.status is TodoStatus.DONE or _tried_before(todo, earlier):
        return _tried(todo, earlier, ground)
    if todo.status is TodoStatus.SKIPPED and _last_mover(todo, earlier) is Who.PERSON:
        reason = f"session {earlier.id}: {todo.reason}"
        return Place(TodoStatus.SKIPPED, reason, "dropped by a person", by=Who.PERSON)
    why = f": {todo.reason}" if todo.reason and todo.status is not TodoStatus.GATED else ""
    return _open(todo, earlier, ground, f"not settled in session {earlier.id}{why}")


def _open(todo: Todo, earlier: Earlier, ground: Ground, reason: str) -> Place:
    """Its turn is still to come, as far as the new session file allows it; an approval that was given stands."""
    admitted = admission(todo.experiment, ground.policy)
    approved = (Who.PERSON, TodoStatus.PENDING) in earlier.movers.get(todo.id, ())
    if admitted.status is TodoStatus.SKIPPED:
        return Place(TodoStatus.SKIPPED, admitted.reason, "forbidden by the session file")
    if admitted.status is TodoStatus.GATED and not approved:
        return Place(TodoStatus.GATED, f"{admitted.reason}; {reason}", "waiting for approval")
    stands = Who.PERSON if admitted.status is TodoStatus.GATED else None
    return Place(TodoStatus.PENDING, reason + "; approved then" * (stands is not None), "pending", by=stands)


def _blocked(todo: Todo, earlier: Earlier, ground: Ground) -> Place:
    """A block holds for the version of the engine and the hardware that showed it."""
    moved = _moved(earlier, ground, method=False)
    if moved:
        return _open(todo, earlier, ground, f"blocked in session {earlier.id}, but {moved} ({todo.reason})")
    return Place(TodoStatus.BLOCKED, f"blocked in session {earlier.id}: {todo.reason}", "blocked")


def _tried(todo: Todo, earlier: Earlier, ground: Ground) -> Place:
    """Tried before: never again where the same would come of it, else on what new ground."""
    would_be = ground.would_be(todo.experiment.changes)
    made = None if would_be is None else identity(would_be, ground.workload_revision, ground.adoption)
    verdict = earlier.known.verdicts.get(todo.id)
    word = f"{verdict.outcome}, {verdict.reason}" if verdict is not None else todo.reason
    again = f"tried in session {earlier.id}: {word}"
    if todo.experiment.changes and would_be == ground.adoption.spec.fingerprint:
        return Place(None, "it is part of what runs now", "part of what runs now")
    if verdict is not None and verdict.outcome is Outcome.BETTER:
        return _open(todo, earlier, ground, f"{again}; what runs now is without it")
    if not todo.experiment.changes:
        return Place(None, "observed anew where it is asked for", "observations")
    if made is not None and made in _tried_identities(earlier):
        return Place(TodoStatus.SKIPPED, again, "tried already", made)
    moved = _moved(earlier, ground, method=True)
    if moved:
        return _open(todo, earlier, ground, f"{again}; but {moved}")
    shared = _kept_since(todo, earlier, ground)
    if shared is not None and not shared:
        reason = f"{again}; nothing that was kept since shares a tag with it"
        return Place(TodoStatus.SKIPPED, reason, "tried already", todo.identity)
    since = f"{', '.join(shared)} kept since" if shared else "another configuration runs now"
    return _open(todo, earlier, ground, f"{again}; but {since}")


def _tried_before(todo: Todo, earlier: Earlier) -> bool:
    """Whether it stood on the earlier list only as something that had been tried before that."""
    return todo.status is TodoStatus.SKIPPED and bool(todo.identity) and not earlier.movers.get(todo.id)


def _kept_since(todo: Todo, earlier: Earlier, ground: Ground) -> list[str] | None:
    """What was kept after the todo was tried and shares a tag; None when what runs now isn't what was left then."""
    if ground.adoption.spec.fingerprint != earlier.known_good:
        return None
    verdicts, order = earlier.known.verdicts, [*earlier.known.verdicts]
    later = order[order.index(todo.id) + 1 :] if todo.id in order else order
    experiments = {one.id: one.experiment for one in earlier.known.todos}
    kept = [name for name in later if experiments[name].tries and verdicts[name].outcome is Outcome.BETTER]
    return [name for name in kept if {*experiments[name].tags} & {*todo.experiment.tags}]


def _moved(earlier: Earlier, ground: Ground, method: bool) -> str:
    """What differs of engine, hardware and (if it matters) method, in words; empty when nothing does."""
    before, now = earlier.adoption, ground.adoption
    found = []
    if before.engine_version != now.engine_version:
        found.append(f"the engine was {before.engine_version or 'unknown'} and is {now.engine_version or 'unknown'}")
    if before.hardware != now.hardware:
        found.append(f"the hardware was {before.hardware or 'unknown'} and is {now.hardware or 'unknown'}")
    if method and earlier.workload_revision != ground.workload_revision:
        found.append("it is measured in another way")
    return ", ".join(found)


def _tried_identities(earlier: Earlier) -> set[str]:
    settled = (TodoStatus.DONE, TodoStatus.BLOCKED)
    tried = [one for one in earlier.known.todos if one.status in settled or _tried_before(one, earlier)]
    return {todo.identity for todo in tried if todo.identity}


def _last_mover(todo: Todo, earlier: Earlier) -> Who | None:
    moves = earlier.movers.get(todo.id, ())
    return moves[-1][0] if moves else None


# --- as events ---------------------------------------------------------------------------------------------


def _listed(todo: Todo, place: Place, origin: str) -> list[ev.Event]:
    if place.status is None:
        return []
    experiment = todo.experiment.model_copy(update={"priority": todo.priority})
    added = ev.TodoAdded(experiment=experiment, status=place.status, reason=place.reason, origin=origin)
    if not place.identity and place.by is None:
        return [added]
    status = None if place.by is None else place.status
    told = ev.TodoChanged(
        experiment_id=todo.id,
        status=status,
        identity=place.identity or None,
        reason=place.reason,
        by=place.by or Who.AGENT,
    )
    return [added, told]


def _findings(earlier: Earlier, first: str) -> list[Finding]:
    found: list[Finding] = []
    name = first
    for one in earlier.findings:
        scope = one.scope if FOUND_IN in one.scope else f"{one.scope}, {FOUND_IN} {earlier.id}"
        found.append(one.model_copy(update={"id": name, "scope": scope}))
        name = following(name)
    return found
