"""What the night's runs say about noise, drift and one effect: a filter over launches, kept for a grid of noise models.

Pure arithmetic on arrays: no decisions, no words. A `Belief` holds any number of nights side by side (its batch); the
session has one, the benchmark thousands, and both go through the same lines.

Each launch is seen as the mean of its runs on the log scale:

    mean = level + effect (candidate launches only) + launch luck + run luck / √runs

The level moves on with every launch, by a slope that is learned and by a random step. A model of the grid fixes the
launch spread and the drift relative to the run spread; the run spread itself is learned under each model, so that an
effect is Student-distributed under one model and a mixture of Students over all of them. The weight of a model is its
prior times how well it foretold each launch before it was seen. (Local linear trend with an unknown scale: West and
Harrison, Bayesian Forecasting and Dynamic Models, 1997, chapters 4 and 12.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]

UNKNOWN = 1e9
"""Variance, in units of the run's, of what nothing is known about."""

CLIP = 2.0
"""A launch of the parent further than this many standard deviations from what was expected moves its level no further;
what it says about the size of the noise is taken in full."""

LAUNCH_SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
LAUNCH_WEIGHTS = (0.20, 0.25, 0.20, 0.13, 0.09, 0.06, 0.04, 0.03)
"""Launch spread as a multiple of the run spread, and how much each is believed before anything is seen."""

DRIFTS = ((0.01, 0.05, 0.5), (0.1, 0.1, 0.3), (0.2, 0.15, 0.2))
"""Random step and slope per launch as multiples of a launch's spread, and the weight of each pair."""

(
    LEVEL,
    SLOPE,
    EFFECT,
    LEVEL_LEVEL,
    LEVEL_SLOPE,
    LEVEL_EFFECT,
    SLOPE_SLOPE,
    SLOPE_EFFECT,
    EFFECT_EFFECT,
    LOGS,
    SQUARES,
) = range(11)


@dataclass(frozen=True)
class Models:
    """The grid: per model its log prior weight and its variances in units of the run's variance."""

    log_weight: Floats
    launch: Floats
    step: Floats
    slope: Floats


@lru_cache(maxsize=1)
def models() -> Models:
    """Every launch spread with every drift."""
    launch, weight, step, slope = (
        np.array(column)
        for column in zip(
            *(
                (spread**2, w * v, walk**2 * (spread**2 + 0.5), trend**2 * (spread**2 + 0.5))
                for spread, w in zip(LAUNCH_SPREADS, LAUNCH_WEIGHTS, strict=True)
                for walk, trend, v in DRIFTS
            ),
            strict=True,
        )
    )
    return Models(log_weight=np.log(weight / weight.sum()), launch=launch, step=step, slope=slope)


@dataclass(frozen=True)
class Belief:
    """State of the filter: `fields` × batch × models, and how many degrees of freedom the run spread rests on."""

    fields: Floats
    freedom: Floats

    def __getitem__(self, where: Indices | Bools) -> Belief:
        return Belief(self.fields[:, where], self.freedom[where])

    def put(self, where: Indices | Bools, other: Belief) -> Belief:
        """These nights replaced by those of `other`."""
        fields, freedom = self.fields.copy(), self.freedom.copy()
        fields[:, where], freedom[where] = other.fields, other.freedom
        return Belief(fields, freedom)


def nothing_seen(nights: int, prior_sd: float, prior_runs: float) -> Belief:
    """Before the first run: the spread of one run is about `prior_sd`, which is worth `prior_runs` runs."""
    grid = models()
    fields = np.zeros((11, nights, len(grid.launch)))
    fields[LEVEL_LEVEL] = fields[EFFECT_EFFECT] = UNKNOWN
    fields[SLOPE_SLOPE] = grid.slope
    fields[SQUARES] = prior_runs * prior_sd**2
    return Belief(fields, np.full(nights, float(prior_runs)))


def new_candidate(belief: Belief) -> Belief:
    """Forget the effect of the last candidate; what its launches said about the level and the noise stays."""
    fields = belief.fields.copy()
    fields[EFFECT] = fields[LEVEL_EFFECT] = fields[SLOPE_EFFECT] = 0.0
    fields[EFFECT_EFFECT] = UNKNOWN
    return Belief(fields, belief.freedom)


def new_parent(belief: Belief) -> Belief:
    """After a keep: another configuration is the baseline, its level is unknown; noise and drift are as they were."""
    fields = belief.fields.copy()
    fields[LEVEL] = fields[LEVEL_SLOPE] = fields[LEVEL_EFFECT] = 0.0
    fields[LEVEL_LEVEL] = UNKNOWN
    return Belief(fields, belief.freedom)


def after_launch(belief: Belief, candidate: Bools, mean: Floats, runs: Floats, squares: Floats) -> Belief:
    """The belief after one launch: mean of its `runs` and their squared deviations from it; 0 runs: it was not seen."""
    grid = models()
    a = belief.fields.copy()
    a[LEVEL] += a[SLOPE]
    a[LEVEL_LEVEL] += 2 * a[LEVEL_SLOPE] + a[SLOPE_SLOPE] + grid.step
    a[LEVEL_SLOPE] += a[SLOPE_SLOPE]
    a[LEVEL_EFFECT] += a[SLOPE_EFFECT]
    seen = (runs > 0)[:, None]
    c = candidate.astype(float)[:, None]
    to_level = a[LEVEL_LEVEL] + c * a[LEVEL_EFFECT]
    to_slope = a[LEVEL_SLOPE] + c * a[SLOPE_EFFECT]
    to_effect = a[LEVEL_EFFECT] + c * a[EFFECT_EFFECT]
    variance = to_level + c * to_effect + grid.launch + 1 / np.maximum(runs, 1)[:, None]
    foretold = seen & (variance < UNKNOWN / 100)
    surprise = np.where(seen, mean[:, None] - a[LEVEL] - c * a[EFFECT], 0.0)
    limit = CLIP * np.sqrt(variance * a[SQUARES] / belief.freedom[:, None])
    moved = np.where(foretold & (c == 0), np.clip(surprise, -limit, limit), surprise)
    gain = np.where(seen, 1 / variance, 0.0)
    a[LEVEL] += gain * to_level * moved
    a[SLOPE] += gain * to_slope * moved
    a[EFFECT] += gain * to_effect * moved
    a[LEVEL_LEVEL] -= gain * to_level**2
    a[LEVEL_SLOPE] -= gain * to_level * to_slope
    a[LEVEL_EFFECT] -= gain * to_level * to_effect
    a[SLOPE_SLOPE] -= gain * to_slope**2
    a[SLOPE_EFFECT] -= gain * to_slope * to_effect
    a[EFFECT_EFFECT] -= gain * to_effect**2
    a[LOGS] += np.where(foretold, np.log(variance), 0.0)
    a[SQUARES] += np.where(foretold, surprise**2 / variance, 0.0) + np.where(seen, squares[:, None], 0.0)
    freedom = belief.freedom + foretold[:, 0] + np.maximum(runs - 1, 0)
    return Belief(a, freedom)


def weights(belief: Belief) -> Floats:
    """How much each model is believed now."""
    freedom = belief.freedom[:, None]
    log = models().log_weight - 0.5 * belief.fields[LOGS] - 0.5 * freedom * np.log(belief.fields[SQUARES])
    weight = np.exp(log - log.max(axis=1, keepdims=True))
    normal: Floats = weight / weight.sum(axis=1, keepdims=True)
    return normal


def chance_below(belief: Belief, effect: float, weight: Floats) -> Floats:
    """The chance that the true effect is at most `effect` (a log-ratio), given all that was seen."""
    variance = belief.fields[SQUARES] / belief.freedom[:, None] * belief.fields[EFFECT_EFFECT]
    t = (effect - belief.fields[EFFECT]) / np.sqrt(variance)
    chance: Floats = (weight * special.stdtr(belief.freedom[:, None], t)).sum(axis=1)
    return chance


def level(belief: Belief, weight: Floats, candidate: bool) -> tuple[Floats, Floats, Floats]:
    """What a typical launch of either side shows now: the mixture's mean, and each model's mean and variance."""
    mean, variance = belief.fields[LEVEL], belief.fields[LEVEL_LEVEL]
    if candidate:
        mean = mean + belief.fields[EFFECT]
        variance = variance + 2 * belief.fields[LEVEL_EFFECT] + belief.fields[EFFECT_EFFECT]
    middle: Floats = (weight * mean).sum(axis=1)
    return middle, mean, variance * belief.fields[SQUARES] / belief.freedom[:, None]


def chance_level_below(belief: Belief, value: float, weight: Floats, candidate: bool) -> Floats:
    """The chance that a typical launch of the candidate (or the parent) lies at most at `value`, a logarithm."""
    _, mean, variance = level(belief, weight, candidate)
    chance: Floats = (weight * special.stdtr(belief.freedom[:, None], (value - mean) / np.sqrt(variance))).sum(axis=1)
    return chance


def run_variance(belief: Belief, weight: Floats) -> Floats:
    """Variance of one run's log tok/s within a launch."""
    variance: Floats = (weight * belief.fields[SQUARES]).sum(axis=1) / belief.freedom
    return variance


def launch_variance(belief: Belief, weight: Floats) -> Floats:
    """Variance from launch to launch that averaging runs of one launch doesn't take away."""
    variance: Floats = (weight * belief.fields[SQUARES] * models().launch).sum(axis=1) / belief.freedom
    return variance
