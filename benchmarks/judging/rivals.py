"""Rules that published tuning loops keep by, played on the same noise; each is as its words say, none is improved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from judging.worlds import Floats, Indices, MadeUp


@dataclass(frozen=True)
class Kept:
    """Nights × experiments: what was kept; and what each experiment cost the candidate."""

    kept: Floats
    runs: float
    launches: float


class Nights:
    """Some nights on one world, with the level that the last keep left."""

    def __init__(self, world: MadeUp, effects: Floats) -> None:
        self.world = world
        self.effects = effects
        self.everyone: Indices = np.arange(len(effects))
        self.level = np.zeros(len(effects))

    def measured(self, experiment: int | None, runs: int) -> Floats:
        """Mean of some runs of a new launch, of the candidate or (None) of what is kept."""
        self.world.launch(self.everyone)
        effect = self.level + (0.0 if experiment is None else self.effects[:, experiment])
        return np.mean([self.world.run(self.everyone, effect) for _ in range(runs)], axis=0)

    def keep(self, experiment: int, kept: Floats) -> Floats:
        """Move on with what was kept."""
        self.level = self.level + np.where(kept, self.effects[:, experiment], 0.0)
        return kept


def threshold(runs: int) -> Callable[[MadeUp, Floats], Kept]:
    """Keep what is more than 1 % better than the best before, by the mean of `runs` runs."""

    def play(world: MadeUp, effects: Floats) -> Kept:
        nights = Nights(world, effects)
        best, all_kept = nights.measured(None, runs), []
        for number in range(effects.shape[1]):
            value = nights.measured(number, runs)
            kept = nights.keep(number, value > best + np.log(1.01))
            best = np.where(kept, value, best)
            all_kept.append(kept)
        return Kept(np.stack(all_kept, axis=1), runs, 1)

    return play


def paired(said: Callable[[Floats], Floats]) -> Callable[[MadeUp, Floats], Kept]:
    """Three pairs of launches, candidate and parent; `said` looks at the three differences of each night."""

    def play(world: MadeUp, effects: Floats) -> Kept:
        nights = Nights(world, effects)
        all_kept = []
        for number in range(effects.shape[1]):
            pairs = np.stack([nights.measured(number, 1) - nights.measured(None, 1) for _ in range(3)])
            all_kept.append(nights.keep(number, said(pairs)))
        return Kept(np.stack(all_kept, axis=1), 3, 3)

    return play


def bootstrap(pairs: Floats) -> Floats:
    """The 5 % quantile of the mean over all 27 resamples of three pairs is above zero."""
    means = np.stack([pairs[list(drawn)].mean(axis=0) for drawn in itertools.product(range(3), repeat=3)])
    return np.quantile(means, 0.05, axis=0, method="inverted_cdf") > 0


def same_sign(pairs: Floats) -> Floats:
    """The median is a gain and all three pairs agree."""
    return (pairs > 0).all(axis=0)


def best_over_mad(world: MadeUp, effects: Floats) -> Kept:
    """The improvement over the first value is at least twice the median absolute deviation of all values so far."""
    nights = Nights(world, effects)
    values, all_kept = [nights.measured(None, 1)], []
    best = values[0]
    for number in range(effects.shape[1]):
        value = nights.measured(number, 1)
        values.append(value)
        spread = np.median(np.abs(np.array(values) - np.median(values, axis=0)), axis=0)
        enough = len(values) >= 3
        kept = nights.keep(number, enough & (value > best) & (value - values[0] >= 2 * spread))
        best = np.where(kept, value, best)
        all_kept.append(kept)
    return Kept(np.stack(all_kept, axis=1), 1, 1)


RIVALS: dict[str, Callable[[MadeUp, Floats], Kept]] = {
    "one run, keep if > 1 %": threshold(1),
    "mean of 3 runs, keep if > 1 %": threshold(3),
    "bootstrap lower bound, 3 pairs": paired(bootstrap),
    "median of 3 pairs, equal sign": paired(same_sign),
    "best / MAD ≥ 2": best_over_mad,
}
