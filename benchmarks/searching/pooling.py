"""What a recorded setting is worth, told from its own few runs and from all others; pure numbers, it knows no planner.

A setting that was launched twice is itself off by some percent, and the best of many such means is the luckiest. So
each is drawn towards what its knobs do on the whole: main effects and two-way interactions, fitted by least squares.
How far is decided by the data: with s² the variance of a launch about its setting's mean (from the repeats) and t² the
variance of the settings about the fit beyond that, a mean of n launches keeps the share w = t² / (t² + s² / n) of its
distance from the fit. This is the estimator of Fay and Herriot (Estimates of income for small places: an application of
James-Stein procedures to census data, JASA 74, 1979), with t² by moments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.searching.spaces import Setting

Floats = NDArray[np.float64]
ORDER = 2
"""Knobs in one interaction, at most."""


@dataclass(frozen=True)
class Pooled:
    """Estimates by setting, and the two spreads that they rest on."""

    raw: dict[Setting, float]
    fitted: dict[Setting, float]
    estimate: dict[Setting, float]
    launch_sd: float
    setting_sd: float


def pooled(settings: Sequence[Setting], values: Sequence[float]) -> Pooled:
    """Estimates from one value a launch."""
    cells: dict[Setting, list[float]] = {}
    for setting, value in zip(settings, values, strict=True):
        cells.setdefault(setting, []).append(value)
    names = list(cells)
    means = np.array([np.mean(cells[name]) for name in names])
    counts = np.array([len(cells[name]) for name in names], dtype=float)
    fit, free = _fitted(names, means, counts)
    within = sum(float(np.sum((np.array(cells[name]) - mean) ** 2)) for name, mean in zip(names, means, strict=True))
    repeats = int(counts.sum()) - len(names)
    launch_var = within / repeats if repeats else 0.0
    beyond = float(np.sum(counts * (means - fit) ** 2)) / free if free > 0 else 0.0
    setting_var = max(0.0, (beyond - launch_var) / float(counts.mean()))
    spread = setting_var + launch_var / counts
    share = np.where(spread > 0, setting_var / np.where(spread > 0, spread, 1.0), 1.0)
    drawn = fit + share * (means - fit)
    return Pooled(
        raw=dict(zip(names, map(float, means), strict=True)),
        fitted=dict(zip(names, map(float, fit), strict=True)),
        estimate=dict(zip(names, map(float, drawn), strict=True)),
        launch_sd=float(np.sqrt(launch_var)),
        setting_sd=float(np.sqrt(setting_var)),
    )


def _fitted(names: Sequence[Setting], means: Floats, counts: Floats) -> tuple[Floats, int]:
    """The least-squares fit of the means, and how many settings there are beyond its free figures."""
    design = _design(names)
    weight = np.sqrt(counts)[:, None]
    solution, _, rank, _ = np.linalg.lstsq(design * weight, means * weight[:, 0], rcond=None)
    fit: Floats = design @ solution
    return fit, len(names) - int(rank)


def _design(names: Sequence[Setting]) -> Floats:
    """An indicator for each value of a knob and each pair of values of two; lstsq copes with those that are implied."""
    knobs = range(len(names[0]))
    columns = [np.ones(len(names))]
    for order in range(1, ORDER + 1):
        for chosen in itertools.combinations(knobs, order):
            found = [tuple(name[knob] for knob in chosen) for name in names]
            columns += [np.array([one == kind for one in found], dtype=float) for kind in dict.fromkeys(found)]
    return np.stack(columns, axis=1)
