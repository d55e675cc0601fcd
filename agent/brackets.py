"""The next value of a knob for an experiment that did not run for it, by all launches alike else; pure.

A server that lacks memory says which way to move which knob. The experiment goes on as another one, with its own
changes and that knob set. What was tried is read from the launches, so that following this advice ends: opposite
advice meets in the middle, and a bracket that closes is a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from agent.catalogue.entries import book, engines
from agent.catalogue.spans import SERVES_LESS, span_of_knob
from agent.known import Known, Trouble, failed_start, under_load
from state.models import Change, EnvChange, Experiment, FlagChange, LaunchSpec, Source, Trial, TrialStatus
from tools.diagnose import Action
from tools.next_step import ADJUSTMENTS, Attempt, Bracket, Span, bracket

FRACTION_STEP, FRACTION_RESOLUTION = 0.04, 0.01
FRACTIONS = (0.05, 0.99)
"""Span of a fraction about which no catalogue says anything."""
FIRST_STEP = 8
"""The first step of a whole number is this part of its first value."""
WIDTH = 64
"""A whole number about which no catalogue says anything may become so many times as large."""
UNSTATED = 1024.0
"""Taken for a whole number that neither configuration nor catalogue states."""


class FollowUp(NamedTuple):
    """How an experiment goes on, or None when it does not, and where its knob stands."""

    experiment: Experiment | None
    knob: str
    bracket: Bracket


def follow_up(experiment: Experiment, trouble: Trouble, known: Known) -> FollowUp:
    """The experiment with the value that its failures ask for, or why no value is left."""
    knob = trouble.failure.knob
    candidate = known.specs.get(known.candidates.get(experiment.id, ""))
    if candidate is None:
        return FollowUp(None, knob, Bracket(None, "its configuration is not on record", 0.0, 0.0))
    if knob in SERVES_LESS and trouble.step is Action.ADJUST_DOWN:
        reason = f"a smaller {knob} would refuse requests that are served now"
        return FollowUp(None, knob, Bracket(None, reason, 0.0, _value(candidate, knob) or 0.0))
    history, span = _history(candidate, knob, known)
    found = bracket(history, span)
    if found.value is None:
        return FollowUp(None, knob, found)
    root = _root(experiment, known)
    text = _text(found.value)
    taken = {todo.id for todo in known.todos}
    priority = next(todo.priority for todo in known.todos if todo.id == experiment.id)
    follower = root.model_copy(
        update={
            "id": _free_id(f"{root.id}-{knob.strip('-').replace('_', '-').lower()}-{text}", taken),
            "title": f"{root.title}, with {knob} {text} since {found.reason}",
            "hypothesis": f"{root.hypothesis} It did not run as it was: {trouble.failure.cause}",
            "changes": (*(change for change in root.changes if not _sets(change, knob)), _change(knob, text)),
            "priority": priority,
            "source": Source(kind="built-in", ref=root.id),
        }
    )
    return FollowUp(follower, knob, found)


def span_of(engine: str, knob: str, value: float | None) -> Span:
    """What is sensible for a knob: the catalogue's span, else a stated one around its first value."""
    limits = span_of_knob(engine, knob)
    if limits is None:
        limits = FRACTIONS if value is not None and 0 < value <= 1 else (1.0, WIDTH * (value or UNSTATED))
    low, high = limits
    if high <= 1:
        return Span(low, high, FRACTION_STEP, FRACTION_RESOLUTION)
    step = max(1.0, (value or high) // FIRST_STEP)
    return Span(low, high, step, max(1.0, step // (2 * FIRST_STEP)))


# --- parts -------------------------------------------------------------------------------------------------


def _history(candidate: LaunchSpec, knob: str, known: Known) -> tuple[list[Attempt], Span]:
    """Every value of the knob that was launched with the same other settings, in order, and the knob's span."""
    others = _without(candidate, knob)
    alike = [
        fingerprint
        for fingerprint in dict.fromkeys(trial.fingerprint for trial in known.trials)
        if fingerprint in known.specs and _without(known.specs[fingerprint], knob) == others
    ]
    stated = [value for name in alike if (value := _value(known.specs[name], knob)) is not None]
    span = span_of(candidate.engine, knob, stated[0] if stated else None)
    attempts = []
    for name in alike:
        trials = [trial for trial in known.trials if trial.fingerprint == name]
        advice = _advice(trials, knob, known)
        value = _value(known.specs[name], knob)
        if advice is not None:
            # A value that nobody states lies somewhere in the span: the far end costs tries, but no wrong step.
            far = span.low if advice.step is Action.ADJUST_UP else span.high
            attempts.append(Attempt(far if value is None else value, advice.step, advice.failure.bound))
        elif value is not None and any(trial.status is TrialStatus.READY for trial in trials):
            attempts.append(Attempt(value))
    return attempts, span


def _advice(trials: Iterable[Trial], knob: str, known: Known) -> Trouble | None:
    """The newest advice about the knob that launches of one configuration gave, at their start or under load."""
    newest = None
    for experiment_id in dict.fromkeys(trial.experiment_id for trial in trials):
        fingerprint = known.candidates.get(experiment_id, "")
        for trouble in (
            failed_start([*trials], experiment_id, fingerprint),
            under_load(known.complaints, [*trials], experiment_id, fingerprint),
        ):
            if trouble is not None and trouble.step in ADJUSTMENTS and trouble.failure.knob == knob:
                newest = trouble
    return newest


def _root(experiment: Experiment, known: Known) -> Experiment:
    """The experiment that this one goes on for, itself if it is the first."""
    known_ids = {todo.id: todo.experiment for todo in known.todos}
    if experiment.source.kind != "built-in":
        return experiment
    return known_ids.get(experiment.source.ref, experiment)


def _without(spec: LaunchSpec, knob: str) -> LaunchSpec:
    """The configuration with one knob unsaid, however it was spelled."""
    flags = {name: values for name, values in spec.flags.items() if name != knob}
    env = {name: value for name, value in spec.env.items() if name != knob}
    return spec.model_copy(update={"flags": flags, "env": env, "argv": ()})


def _value(spec: LaunchSpec, knob: str) -> float | None:
    """The knob's number in a configuration, or what the engine takes when it is not there; None if nobody says."""
    said = (*spec.flags.get(knob, ()), *([spec.env[knob]] if knob in spec.env else []))
    if not said and spec.engine in engines():
        default = book(spec.engine).defaults.get(knob)
        said = () if default is None else (default,)
    try:
        return float(said[-1]) if said else None
    except ValueError:
        return None


def _sets(change: Change, knob: str) -> bool:
    return isinstance(change, FlagChange | EnvChange) and change.name == knob


def _change(knob: str, text: str) -> Change:
    return FlagChange(name=knob, value=text) if knob.startswith("-") else EnvChange(name=knob, value=text)


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) and value >= 1 else f"{value:g}"


def _free_id(wanted: str, taken: Collection[str]) -> str:
    """The id itself, or with a number behind it: after a keep the same value may be tried again."""
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name
