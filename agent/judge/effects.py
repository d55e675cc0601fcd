"""Effects with intervals, and the guards that veto a gain: what the runs say at each load point; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize

from agent.judge import noise
from agent.judge.comparison import Comparison, guard_points, log_tok_s, parent_runs, runs_at
from agent.judge.noise import Belief
from agent.judge.series import knows_parent, launch_of, night_belief, own_launches
from agent.validity import COLLAPSED
from state.models import Arm, Effect, Measurement, MeasurementStatus

REPORT_CONFIDENCE = 0.95
SETTLED_LAUNCHES = 2
"""Candidate launches from which a guard goes by what is likelier; before, harm must be all but certain."""


def believed(comparison: Comparison, points: Sequence[str]) -> Belief | None:
    """All that was seen of a series up to now; None until both sides were measured."""
    belief = noise.new_candidate(night_belief(comparison, points))
    for arm, _, values in own_launches(comparison, points):
        launch = launch_of(arm, values)
        belief = noise.after_launch(belief, launch.candidate, launch.mean, launch.runs, launch.squares)
    unknown = belief.fields[noise.EFFECT_EFFECT, 0, 0] > noise.UNKNOWN / 100
    return None if unknown or not knows_parent(belief) else belief


def effect_of(comparison: Comparison, points: Sequence[str], confidence: float = REPORT_CONFIDENCE) -> Effect | None:
    """Effect on the mean of some load points with a two-sided interval."""
    belief = believed(comparison, points)
    if belief is None:
        return None
    weight = noise.weights(belief)
    tail = (1 - confidence) / 2
    counts = {}
    for name, arm in (("candidate", Arm.CANDIDATE), ("baseline", Arm.BASELINE)):
        runs = [runs_at(comparison, arm, p) if arm is Arm.CANDIDATE else parent_runs(comparison, p) for p in points]
        counts[f"n_{name}"] = min(len(found) for found in runs)
        counts[f"launches_{name}"] = min(len({m.trial_id for m in found}) for found in runs)
    return Effect(
        estimate=float((weight * belief.fields[noise.EFFECT]).sum()),
        low=_quantile(belief, tail),
        high=_quantile(belief, 1 - tail),
        **counts,
    )


def effect_at(comparison: Comparison, point: str, confidence: float = REPORT_CONFIDENCE) -> Effect | None:
    """Effect at one load point; None until both arms have a valid run."""
    return effect_of(comparison, (point,), confidence)


def objective_effect(comparison: Comparison, confidence: float = REPORT_CONFIDENCE) -> Effect | None:
    """Mean of the effects at the objective's load points; None until each has both arms."""
    return effect_of(comparison, comparison.workload.objective.at, confidence)


def all_effects(comparison: Comparison) -> dict[str, Effect]:
    """The effect at every load point where there is one."""
    found = ((p.name, effect_at(comparison, p.name)) for p in comparison.workload.load_points)
    return {name: effect for name, effect in found if effect is not None}


def run_noise(comparison: Comparison, point: str) -> float:
    """Log-spread of one run at a load point, as known from the whole night and this experiment."""
    belief = noise.new_candidate(night_belief(comparison, (point,)))
    for arm, _, values in own_launches(comparison, (point,)):
        launch = launch_of(arm, values)
        belief = noise.after_launch(belief, launch.candidate, launch.mean, launch.runs, launch.squares)
    return math.sqrt(float(noise.run_variance(belief, noise.weights(belief))[0]))


def collapse(comparison: Comparison) -> str | None:
    """Which candidate run fell so far below the parent that no statistics are needed."""
    floor = math.log(comparison.rule.collapse_ratio)
    for taken in comparison.own:
        if taken.arm is not Arm.CANDIDATE:
            continue
        if taken.status is MeasurementStatus.INVALID and taken.reasons[:1] == (COLLAPSED,):
            return f"{taken.load_point}: {taken.reasons[1]}"
        value = log_tok_s(taken)
        reference = [v for m in parent_runs(comparison, taken.load_point) if (v := log_tok_s(m)) is not None]
        if value is not None and reference and value - float(np.mean(reference)) < floor:
            share = math.exp(value - float(np.mean(reference)))
            return f"{taken.load_point}: one run reached {share:.0%} of the baseline"
    return None


def harm(comparison: Comparison) -> str | None:
    """A guard vetoes when a loss beyond its tolerance is likelier than not, given enough launches to mean it.

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
        settled = effect.launches_candidate >= SETTLED_LAUNCHES
        if chance > (0.5 if settled else (1 + REPORT_CONFIDENCE) / 2):
            return f"{name} loses: {effect.percent}, tolerance {math.expm1(tolerance):+.0%}"
    return None


def unguarded(comparison: Comparison) -> list[str]:
    """Load points at which a loss beyond the tolerance can't be ruled out."""
    low = _tolerance(comparison)
    found = ((p.name, effect_at(comparison, p.name)) for p in guard_points(comparison.workload))
    return sorted(name for name, effect in found if effect is None or effect.low < low)


def broken_slo(comparison: Comparison) -> str | None:
    """A ceiling that the candidate's median run is above; one that the baseline broke already is no fresh harm."""
    guards = comparison.workload.guards
    for limit, field in ((guards.ttft_p90_ms, "ttft_ms"), (guards.tpot_p90_ms, "tpot_ms")):
        if limit is None:
            continue
        for point in comparison.workload.load_points:
            candidate = _p90_ms(runs_at(comparison, Arm.CANDIDATE, point.name), field)
            baseline = _p90_ms(parent_runs(comparison, point.name), field)
            if candidate is not None and candidate > max(limit, baseline or 0.0):
                return f"{point.name}: {field[:4]} p90 {candidate:.0f} ms is above {limit:.0f} ms"
    return None


def _p90_ms(runs: Sequence[Measurement], field: str) -> float | None:
    values = [p90 for m in runs if m.metrics and (p90 := getattr(m.metrics, field).p90) is not None]
    return float(np.median(values)) if values else None


def _tolerance(comparison: Comparison) -> float:
    return math.log1p(-comparison.workload.guards.other_points_tolerance)


def _quantile(belief: Belief, chance: float) -> float:
    """The effect below which the true one lies with this chance."""
    weight = noise.weights(belief)
    middle = float((weight * belief.fields[noise.EFFECT]).sum())
    reach = 1e-6

    def excess(effect: float) -> float:
        return float(noise.chance_below(belief, effect, weight)[0]) - chance

    while excess(middle - reach) > 0 or excess(middle + reach) < 0:
        reach *= 4
    return float(optimize.brentq(excess, middle - reach, middle + reach, xtol=1e-9))
