"""What of a language model's proposals may go on the list; pure, and it trusts nothing that was said.

A proposal is a title, a hypothesis and typed changes of flags and variables that the live server lists as its own.
Words are only ever shown; topics, numerics and needs come from the catalogue, so that no wording slips past the rules
of the session file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from agent.catalogue.entries import ModelTrait
from agent.catalogue.knowledge import Knowledge, PlainChange, knowledge
from agent.planners.answer import CHANGES, PROPOSALS, complaint, tidy
from agent.planners.catalogue import NUMERICS
from agent.policy import SERVES, broken_constraints, forbidden
from state.errors import RatchetError
from state.models import EnvChange, Experiment, FlagChange, Frozen, LaunchSpec, Policy, Source

OWN = "model-"
"""How the ids of a language model's experiments begin."""
TIER = 2
LONGEST_VALUE = 200


def _as_text(value: object) -> object:
    """A number means what it spells; a truth value means nothing that a flag could take."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class SaidChange(Frozen):
    """One change as the model words it."""

    kind: Literal["flag", "env"]
    name: str = Field(min_length=1, max_length=100)
    action: Literal["set", "remove"] = "set"
    value: Annotated[str | None, BeforeValidator(_as_text)] = Field(default=None, max_length=LONGEST_VALUE)

    def change(self) -> PlainChange:
        """As it would go on the list."""
        if self.kind == "flag":
            return FlagChange(name=self.name, value=self.value, remove=self.action == "remove")
        return EnvChange(name=self.name, value=None if self.action == "remove" else self.value)


class SaidExperiment(Frozen):
    """One experiment as the model words it."""

    title: str = Field(min_length=1)
    hypothesis: str = ""
    changes: tuple[SaidChange, ...] = Field(min_length=1, max_length=CHANGES)
    expected_gain: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    risk: str = ""


class Refused(Frozen):
    """What may not go on the list, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Screened(Frozen):
    """What passed, and what did not."""

    accepted: tuple[Experiment, ...] = ()
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """All that a proposal is held against."""

    engine: str
    parent: LaunchSpec
    derive: Callable[[tuple[PlainChange, ...]], LaunchSpec]
    """The parent with changes; raises PolicyRefused, or ServerError for a command line that could not be read."""
    flags: frozenset[str]
    prefixes: tuple[str, ...]
    known: Mapping[str, str]
    """Fingerprint → id of what was tried or waits."""
    policy: Policy
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    model: frozenset[ModelTrait] | None = None
    made: int = 0
    room: int = PROPOSALS
    """How many more may go on the list."""


def screen(items: Sequence[Any], bounds: Bounds, before: Sequence[Experiment] = ()) -> Screened:
    """Hold each proposal against the bounds; `before` passed in the same conversation already."""
    accepted: list[Experiment] = []
    refused: list[Refused] = []
    known = {**bounds.known, **{_fingerprint(bounds, one): one.id for one in before}}
    for item in items[:PROPOSALS]:
        made = [*before, *accepted]
        outcome = _one(item, bounds, known, len(made))
        if isinstance(outcome, Refused):
            refused.append(outcome)
        else:
            accepted.append(outcome)
            known[_fingerprint(bounds, outcome)] = outcome.id
    if items[PROPOSALS:]:
        refused.append(Refused(what=f"{len(items) - PROPOSALS} more", why=f"at most {PROPOSALS} are read at once"))
    return Screened(accepted=tuple(accepted), refused=tuple(refused))


def _fingerprint(bounds: Bounds, experiment: Experiment) -> str:
    return bounds.derive(tuple(c for c in experiment.changes if isinstance(c, FlagChange | EnvChange))).fingerprint


def _one(item: Any, bounds: Bounds, known: Mapping[str, str], made: int) -> Experiment | Refused:
    try:
        said = SaidExperiment.model_validate(item)
    except ValidationError as error:
        return Refused(what=_named(item), why=complaint(error))
    what = tidy(said.title, 80) or "without a title"
    changes = tuple(one.change() for one in said.changes)
    if made >= bounds.room:
        return Refused(what=what, why="no more experiments may be added")
    derived = _derived(said, changes, bounds)
    if isinstance(derived, str):
        return Refused(what=what, why=tidy(derived, 300))
    told = knowledge(bounds.engine, changes, derived, bounds.model)
    experiment = _experiment(said, changes, told, f"{OWN}{bounds.made + made + 1}")
    against = _against(experiment, derived, told, bounds, known)
    return experiment if against is None else Refused(what=what, why=against)


def _named(item: Any) -> str:
    title = item.get("title") if isinstance(item, dict) else None
    return tidy(title, 80) if isinstance(title, str) and title.strip() else "without a title"


def _derived(said: SaidExperiment, changes: tuple[PlainChange, ...], bounds: Bounds) -> LaunchSpec | str:
    """The parent with the changes, or why they can't be."""
    names = [change.name for change in changes]
    if len(set(names)) != len(names):
        return f"{next(name for name in names if names.count(name) > 1)} stands twice in it"
    for one in said.changes:
        if not f"{one.name}{one.value or ''}".isprintable():
            return f"{tidy(one.name, 60)} holds characters that are not printed"
        if one.action == "remove" and one.value is not None:
            return f"{one.name} is to be removed, which takes no value"
        if one.kind == "env" and one.action == "set" and one.value is None:
            return f"{one.name} needs a value"
    try:
        derived = bounds.derive(changes)
    except RatchetError as refused:
        return refused.where.get("reason", refused.what)
    # After the server's own reason, which names the right spelling.
    closed = [change.name for change in changes if not _open(change, bounds)]
    return f"{closed[0]} is not among what may be changed" if closed else derived


def _open(change: PlainChange, bounds: Bounds) -> bool:
    if isinstance(change, FlagChange):
        return change.name in bounds.flags
    return bool(bounds.prefixes) and f"{change.name}=".startswith(bounds.prefixes)


def _experiment(said: SaidExperiment, changes: tuple[PlainChange, ...], told: Knowledge, name: str) -> Experiment:
    return Experiment(
        id=name,
        title=tidy(said.title, 80),
        hypothesis=tidy(said.hypothesis, 400),
        changes=changes,
        tags=told.tags,
        tier=TIER,
        expected_gain=said.expected_gain,
        risk=tidy(said.risk, 200),
        needs=told.needs,
        numerics=told.numerics,
        source=Source(kind="model"),
    )


def _against(
    experiment: Experiment, derived: LaunchSpec, told: Knowledge, bounds: Bounds, known: Mapping[str, str]
) -> str | None:
    """What speaks against an experiment that the server could run, None when nothing does."""
    reason = forbidden(experiment, bounds.policy)
    broken = broken_constraints(derived, bounds.policy)
    # Its opposite or another spelling would move it as well.
    kept = bounds.policy.keep_flags
    broken += [f"the session keeps {n} as it is" for n in kept if derived.flags.get(n) != bounds.parent.flags.get(n)]
    if reason is not None or broken:
        return reason or "; ".join(broken)
    topics = {*experiment.tags, *((NUMERICS,) if experiment.numerics else ())}
    if topics & bounds.skip:
        return f"the session leaves out {', '.join(sorted(topics & bounds.skip))}"
    if bounds.only and not topics & bounds.only:
        return f"the session tries only {', '.join(sorted(bounds.only))}"
    if told.objections:
        return "; ".join(told.objections)
    if derived.fingerprint == bounds.parent.fingerprint:
        return SERVES
    if derived.fingerprint in known:
        return f"the same configuration is on the list as {known[derived.fingerprint]}"
    return None
