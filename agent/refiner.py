"""When the list is refined by what was learned, and what that is: it lays out the store for `agent.refine`.

It chooses and judges nothing, and it writes nothing itself; the node that asks writes all at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agent.catalogue.entries import ModelTrait
from agent.catalogue.knowledge import knowledge
from agent.config import SessionConfig
from agent.evidence import adds, known, learned_since, takes_more
from agent.levers import Setting, plain
from agent.planners.tpe import asked
from agent.policy import SERVES, awaits_approval, broken_constraints, forbidden
from agent.refine import OWN, Learned, Tried, all_at_once, label, refinements, reweighed
from agent.relatives import all_lost
from agent.todo_list import on_the_list
from state import events as ev
from state.errors import RatchetError
from state.models import (
    DecisionKind,
    Experiment,
    LaunchSpec,
    Outcome,
    Role,
    Todo,
    TodoStatus,
    Verdict,
)
from state.store import Store
from state.words import DropWord, PriorityWord
from tools.target import Target

TOO_FEW = "no two ideas that promise enough go together from the beginning"
NOT_WORTH = (
    "no setting, number or pair that was not tried promises enough by what was measured to be worth its launches"
)
WAITS = frozenset({TodoStatus.PENDING, TodoStatus.IN_PROGRESS})


def due(store: Store, session_id: str, config: SessionConfig, idle: bool) -> bool:
    """Whether to refine now: at the beginning, after each keep, and when nothing is ready and something was learned."""
    if not adds(config):
        return False
    news = learned_since(store, session_id, DecisionKind.REFINE)
    if news is not None and not news:
        return False
    kept = news is None or DecisionKind.KEEP.value in news
    if not kept and not idle and not begins(store, session_id):
        return False
    return takes_more(store, session_id, config)


def begins(store: Store, session_id: str) -> bool:
    """Whether nothing was tried yet but what promises most all at once, and less of it may still do."""
    said = ((store.todo(session_id, name), verdict) for name, verdict in store.verdicts(session_id).items())
    tries = ((one.experiment, verdict) for one, verdict in said if one is not None and one.experiment.tries)
    return all(one.id.startswith(OWN) and _less_may_do(one, verdict) for one, verdict in tries)


def _less_may_do(bundle: Experiment, verdict: Verdict) -> bool:
    changed = bundle.numerics and verdict.outcome is Outcome.WORSE
    return changed or verdict.outcome is Outcome.FAILED


def learned(store: Store, session_id: str, config: SessionConfig, new: Sequence[Experiment]) -> Learned:
    """What refinement goes by, with what is `new` on the list.

    What a person dropped, the session forbids, waits for an approval or lacks what it needs is not in it.
    """
    facts = known(store, session_id)
    lost = all_lost(facts)
    usable = [todo for todo in facts.todos if _usable(todo, config) and not lost & {*todo.experiment.needs}]
    out = [todo for todo in facts.todos if plain(todo.experiment) and not _usable(todo, config)]
    dropped = _dropped(store, session_id)
    ready = [one for one in new if on_the_list(one, config.policy).status is TodoStatus.PENDING]
    known_good = store.role(session_id, Role.KNOWN_GOOD)
    assert known_good is not None, "known-good is set when a session opens"
    adopted = store.session(session_id).adoption.spec
    return Learned(
        engine=adopted.engine,
        found=adopted,
        known_good=store.spec(known_good),
        ideas=(*(todo.experiment for todo in usable), *ready),
        pending=(*(todo.experiment for todo in usable if todo.status in WAITS), *ready),
        barred=tuple(plain(todo.experiment) for todo in out if _barred(todo, dropped, config)),
        set_aside=tuple(plain(todo.experiment) for todo in out if not _barred(todo, dropped, config)),
        priorities=_movable(store, session_id, facts.todos),
        tried=tuple(_tried(store, session_id, facts.todos)),
        minimal_effect=config.judge.minimal_effect,
        made=max((int(found[1]) for todo in facts.todos if (found := _NUMBERED.fullmatch(todo.id))), default=0),
        seed=config.seed,
    )


def objection(
    setting: Setting, parent: LaunchSpec, target: Target, config: SessionConfig, model: frozenset[ModelTrait] | None
) -> str | None:
    """Why a setting cannot or may not be made on a configuration, None when it can."""
    try:
        spec = target.derive(parent, setting)
    except RatchetError as error:
        return error.what
    told = knowledge(spec.engine, setting, spec, model)
    whole = Experiment(title="", hypothesis="", changes=setting, tags=told.tags)
    refused = (forbidden(whole, config.policy), awaits_approval(whole, config.policy))
    reasons = (*refused, *broken_constraints(spec, config.policy), *told.objections)
    return next((reason for reason in reasons if reason), None)


def refine(
    store: Store,
    session_id: str,
    config: SessionConfig,
    new: Sequence[Experiment],
    against: Callable[[Setting], str | None],
) -> list[ev.Event]:
    """What follows from what was learned: the decision that says why, what is added to the list, what moves on it.

    `new` fits the configuration that was kept; `against` says why a setting cannot or may not be made. Nothing else is
    asked for but the store, so that a log alone, with what was objected to then, gives the same again.
    """
    facts, first = learned(store, session_id, config, new), begins(store, session_id)
    objections: dict[str, str] = {}

    def objects(setting: Setting) -> bool:
        reason = against(setting)
        if reason is not None:
            objections[label(setting)] = reason
        return reason is not None

    refined = all_at_once(facts, objects) if first else refinements(facts, asked, objects)
    moved = [] if first else reweighed(facts)
    words = [f"{one.id}: {one.title} ({one.hypothesis})" for one in refined]
    words += [f"{one.id} fits the configuration that was kept" for one in new]
    decision = store.decide(
        session_id,
        kind=DecisionKind.REFINE,
        subject=session_id,
        what=f"{len(words)} more on the list" if words else "nothing more on the list",
        reason="; ".join(
            (*(words or (TOO_FEW if first else NOT_WORTH,)), *(f"{one.id} {one.reason}" for one in moved))
        ),
    )
    added = [on_the_list(one, config.policy) for one in (*new, *refined)]
    changes = [
        ev.TodoChanged(experiment_id=one.id, priority=one.priority, reason=f"{one.reason} ({decision.id})")
        for one in moved
    ]
    return [ev.DecisionMade(decision=decision, objections=objections), *added, *changes]


# --- parts -------------------------------------------------------------------------------------------------


def _movable(store: Store, session_id: str, todos: Sequence[Todo]) -> dict[str, float]:
    """Priorities of what is pending, but for what a person has moved: that stays where it was put."""
    placed = {word.todo for word in store.words(session_id) if isinstance(word, PriorityWord)}
    return {todo.id: todo.priority for todo in todos if todo.status is TodoStatus.PENDING and todo.id not in placed}


_NUMBERED = re.compile(re.escape(OWN) + r"(\d+)")


def _dropped(store: Store, session_id: str) -> frozenset[str]:
    """What a person said not to try, here or in the session that this one continues: that came over untried."""
    carried = store.carried_over(session_id)
    words = {word.todo for word in store.words(session_id) if isinstance(word, DropWord)}
    return frozenset(words if carried is None else words | {*carried.todos})


def _barred(todo: Todo, dropped: frozenset[str], config: SessionConfig) -> bool:
    """Whether it is left out by a person's word or the session file's, and not for what was learned."""
    waits = todo.status is TodoStatus.GATED
    return waits or forbidden(todo.experiment, config.policy) is not None or (todo.id in dropped and not todo.identity)


def _usable(todo: Todo, config: SessionConfig) -> bool:
    skipped = todo.status is TodoStatus.SKIPPED and todo.reason != SERVES
    out = skipped or todo.status is TodoStatus.GATED
    return todo.experiment.tries and not out and forbidden(todo.experiment, config.policy) is None


def _tried(store: Store, session_id: str, todos: tuple[Todo, ...]) -> list[Tried]:
    ideas = {todo.id: todo.experiment for todo in todos if todo.experiment.tries}
    found = []
    for name, verdict in store.verdicts(session_id).items():
        if name not in ideas:
            continue
        row = store.comparison(session_id, name)
        found.append(
            Tried(
                experiment=ideas[name],
                parent=store.spec(row.parent),
                candidate=store.spec(row.candidate),
                outcome=verdict.outcome,
                effect=verdict.objective,
                cause=verdict.reason,
            )
        )
    return found
