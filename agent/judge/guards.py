"""What vetoes a gain: a loss at another load point, a latency above its ceiling, worse answers; it never makes a keep.

A guard goes by the chance of harm, never by a point estimate: it vetoes when harm is likelier than not, and what can't
be excluded is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from agent.judge import noise
from agent.judge.answers import Likeness, likeness
from agent.judge.comparison import Comparison, guard_points, ordered_points, runs_at
from agent.judge.effects import REPORT_CONFIDENCE, believed, effect_at, quantile
from agent.judge.noise import Belief
from state.models import Arm, Ceiling, Frozen

SETTLED_LAUNCHES = 2
"""Candidate launches from which a guard goes by what is likelier; before, harm must be all but certain."""

PROVEN = 0.05
"""A ceiling holds when the chance that a typical launch of the candidate is above it is at most this."""


class CeilingSeen(Frozen):
    """One ceiling at one load point, with what a typical launch of the candidate shows; milliseconds."""

    load_point: str
    ceiling: Ceiling
    middle_ms: float
    low_ms: float
    high_ms: float
    chance_above: float
    parent_breaks: bool

    def __str__(self) -> str:
        figure = f"{self.ceiling.metric} {self.ceiling.percentile}"
        seen = f"{self.middle_ms:.0f} ms [{self.low_ms:.0f}, {self.high_ms:.0f}]"
        note = ", which the parent is above as well" if self.parent_breaks else ""
        return f"{self.load_point}: {figure} {seen}, ceiling {self.ceiling.max_ms:g} ms{note}"


def veto(comparison: Comparison) -> str | None:
    """The first guard that speaks against the candidate, in words; None while none does."""
    return loss(comparison) or broken_ceiling(comparison) or broken_answers(comparison)


def loss(comparison: Comparison) -> str | None:
    """Another load point loses more than the tolerance allows, likelier than not.

    With several load points in the objective, none of them may be bought with another.
    """
    objective = comparison.workload.objective.at
    tolerance = _tolerance(comparison)
    guarded = [p.name for p in guard_points(comparison.workload)] + (list(objective) if len(objective) > 1 else [])
    for name in guarded:
        belief = believed(comparison, (name,))
        effect = effect_at(comparison, name)
        if belief is None or effect is None:
            continue
        chance = float(noise.chance_below(belief, tolerance, noise.weights(belief))[0])
        if chance > _patience(comparison, name):
            return f"{name} loses: {effect.percent}, tolerance {math.expm1(tolerance):+.0%}"
    return None


def unguarded(comparison: Comparison) -> list[str]:
    """Load points at which a loss beyond the tolerance can't be ruled out."""
    low = _tolerance(comparison)
    found = ((p.name, effect_at(comparison, p.name)) for p in guard_points(comparison.workload))
    return sorted(name for name, effect in found if effect is None or effect.low < low)


def ceilings(comparison: Comparison) -> Iterator[tuple[Ceiling, str, CeilingSeen | None]]:
    """Every ceiling at every load point where it holds, with what was seen of it; None until both sides were."""
    for ceiling in comparison.workload.guards.ceilings:
        for point in ordered_points(comparison.workload):
            if ceiling.at and point.name not in ceiling.at:
                continue
            belief = believed(comparison, (point.name,), ceiling.series)
            seen = None if belief is None else _seen(belief, ceiling, point.name, -_tolerance(comparison))
            yield ceiling, point.name, seen


def broken_ceiling(comparison: Comparison) -> str | None:
    """A ceiling that the candidate is likelier than not above; where the parent is above it too, a rise of latency
    beyond the tolerance counts instead.
    """
    for _, point, seen in ceilings(comparison):
        if seen is not None and seen.chance_above > _patience(comparison, point):
            return str(seen)
    return None


def unproven_ceilings(comparison: Comparison) -> list[str]:
    """Ceilings that are not shown to hold, in words."""
    return [
        f"{point}: {ceiling.metric} {ceiling.percentile} was not measured" if seen is None else str(seen)
        for ceiling, point, seen in ceilings(comparison)
        if seen is None or seen.chance_above > PROVEN
    ]


def guards_answers(comparison: Comparison) -> bool:
    """Whether the answers are compared at all: always where the numerics change, else as the session file has it."""
    return comparison.numerics or comparison.workload.guards.answers != "off"


def answers(comparison: Comparison) -> Likeness | None:
    """How the candidate's answers compare with the parent's, None when nobody wants to know."""
    if not guards_answers(comparison):
        return None
    return likeness(comparison.parent_answers, comparison.candidate_answers)


def broken_answers(comparison: Comparison) -> str | None:
    """The candidate's answers are those of a broken model."""
    told = answers(comparison)
    return f"the answers to the fixed prompts broke: {told.reason}" if told and told.word == "broken" else None


def unproven_answers(comparison: Comparison) -> str | None:
    """Why the answers forbid a keep although the model isn't broken, None when they don't.

    What changes the numerics must have been compared; elsewhere an unknown is only named.
    """
    told = answers(comparison)
    if told is None or told.word == "same":
        return None
    if told.word == "unknown":
        return f"its answers could not be compared: {told.reason}" if comparison.numerics else None
    strict = comparison.workload.guards.answers == "same"
    return f"the answers are no longer the same: {told.reason}" if strict else None


def _seen(belief: Belief, ceiling: Ceiling, point: str, allowed_rise: float) -> CeilingSeen:
    weight = noise.weights(belief)
    limit = math.log(ceiling.max_ms)

    def below(value: float) -> float:
        return float(noise.chance_level_below(belief, value, weight, candidate=True)[0])

    middle = float(noise.level(belief, weight, candidate=True)[0][0])
    tail = (1 - REPORT_CONFIDENCE) / 2
    low, high = (quantile(below, middle, chance) for chance in (tail, 1 - tail))
    parent_above = 1 - float(noise.chance_level_below(belief, limit, weight, candidate=False)[0])
    above = 1 - below(limit)
    if parent_above > 0.5:
        above = 1 - float(noise.chance_below(belief, allowed_rise, weight)[0])
    return CeilingSeen(
        load_point=point,
        ceiling=ceiling,
        middle_ms=math.exp(middle),
        low_ms=math.exp(low),
        high_ms=math.exp(high),
        chance_above=above,
        parent_breaks=parent_above > 0.5,
    )


def _patience(comparison: Comparison, point: str) -> float:
    """The chance of harm from which a guard vetoes."""
    launches = len({m.trial_id for m in runs_at(comparison, Arm.CANDIDATE, point)})
    return 0.5 if launches >= SETTLED_LAUNCHES else (1 + REPORT_CONFIDENCE) / 2


def _tolerance(comparison: Comparison) -> float:
    return math.log1p(-comparison.workload.guards.other_points_tolerance)
