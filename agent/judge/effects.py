"""Effects with intervals: what the runs say at each load point; pure, it decides only what needs no statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

from agent.judge import noise
from agent.judge.comparison import RATE, Comparison, log_tok_s, parent_runs, runs_at
from agent.judge.noise import Belief
from agent.judge.series import knows_parent, launch_of, night_belief, own_launches
from agent.validity import COLLAPSED
from state.models import Arm, Effect, MeasurementStatus

REPORT_CONFIDENCE = 0.95


def believed(comparison: Comparison, points: Sequence[str], figure: str = RATE) -> Belief | None:
    """All that was seen of a series up to now; None until both sides were measured."""
    belief = noise.new_candidate(night_belief(comparison, points, figure))
    for arm, _, values in own_launches(comparison, points, figure):
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
    estimate = float((weight * belief.fields[noise.EFFECT]).sum())
    low, high = (
        quantile(lambda effect: float(noise.chance_below(belief, effect, weight)[0]), estimate, chance)
        for chance in ((1 - confidence) / 2, (1 + confidence) / 2)
    )
    return Effect(estimate=estimate, low=low, high=high, **_run_counts(comparison, points))


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
    usual: dict[str, float | None] = {}
    for taken in comparison.own:
        if taken.arm is not Arm.CANDIDATE:
            continue
        if taken.status is MeasurementStatus.INVALID and taken.reasons[:1] == (COLLAPSED,):
            return f"{taken.load_point}: {taken.reasons[1]}"
        value = log_tok_s(taken)
        if taken.load_point not in usual:
            logs = [v for m in parent_runs(comparison, taken.load_point) if (v := log_tok_s(m)) is not None]
            usual[taken.load_point] = float(np.mean(logs)) if logs else None
        reference = usual[taken.load_point]
        if value is not None and reference is not None and value - reference < floor:
            share = math.exp(value - reference)
            return f"{taken.load_point}: one run reached {share:.0%} of the baseline"
    return None


def quantile(chance_below: Callable[[float], float], middle: float, chance: float) -> float:
    """The value below which the true one lies with this chance; `chance_below` grows with its argument."""
    reach = 1e-6

    def excess(value: float) -> float:
        return chance_below(value) - chance

    while excess(middle - reach) > 0 or excess(middle + reach) < 0:
        reach *= 4
    return float(optimize.brentq(excess, middle - reach, middle + reach, xtol=1e-9))


def _run_counts(comparison: Comparison, points: Sequence[str]) -> dict[str, int]:
    counts = {}
    for name, arm in (("candidate", Arm.CANDIDATE), ("baseline", Arm.BASELINE)):
        runs = [runs_at(comparison, arm, p) if arm is Arm.CANDIDATE else parent_runs(comparison, p) for p in points]
        counts[f"n_{name}"] = min(len(found) for found in runs)
        counts[f"launches_{name}"] = min(len({m.trial_id for m in found}) for found in runs)
    return counts
