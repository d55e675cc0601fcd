"""What untried configurations would gain, with how much doubt, by what the tried ones did; pure, and it judges nothing.

A Gaussian process over configurations. The log of the objective is taken for a sum of what each flag or variable does
by itself and of what each two of them do together: k(x, y) = Σ_a m² s_a + Σ_(a<b) p_ab² s_a s_b, where s_a is how alike
x and y are at the name a: 1 for equal values, 0 for others, and for numbers exp(-|log x_a - log y_a| / log 4), with
log(1 + x) where a value is 0.
(Additive kernels with interactions: Duvenaud, Nickisch, Rasmussen 2011, "Additive Gaussian Processes".) Only ratios are
ever measured, so it is conditioned on differences between two configurations. Its figures order the list and stop the
search; whether something is kept is the judge's to say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agent.levers import Point, number
from state.models import Frozen

ALONE = 0.15
"""Spread of what one setting does by itself, in log units, before anything is measured."""
RELATED = 0.2
"""Spread of what two settings of the same topic do beyond the sum of both: threads and the way in which they wait."""
UNRELATED = 0.04
"""The same for two settings that share no topic."""
LENGTH = math.log(4)
MOST = 2.0
LEAST_DOUBT = 0.01
"""No measured ratio is known better than this."""


class Seen(Frozen):
    """A measured ratio: how much `to` did better than `base`, in log units, with its standard error."""

    base: dict[str, str]
    to: dict[str, str]
    effect: float
    error: float


class Guess(Frozen):
    """What a configuration would gain over another, in log units."""

    mean: float
    spread: float

    @property
    def hoped(self) -> float:
        """The expected improvement: what is gained on average if losses are reverted (Jones et al. 1998)."""
        if self.spread <= 0:
            return max(0.0, self.mean)
        z = self.mean / self.spread
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return self.mean * 0.5 * math.erfc(-z / math.sqrt(2)) + self.spread * density

    def chance(self, least: float) -> float:
        """The probability of a gain beyond `least`."""
        return 0.5 * math.erfc((least - self.mean) / max(self.spread, 1e-9) / math.sqrt(2))


def guesses(
    points: Sequence[Point],
    over: Point,
    seen: Sequence[Seen],
    hope: Callable[[Point], float],
    topics: Mapping[str, frozenset[str]],
) -> list[Guess]:
    """What each point would gain over the point `over`.

    `hope` is what is expected of a point before anything is measured; `topics` are those of each name.
    """
    names = sorted(topics)
    every = [*points, over, *(one.base for one in seen), *(one.to for one in seen)]
    alike = _alike(every, names, topics, ALONE * _scale(seen))
    hopes = np.array([hope(one) for one in every])
    n, m = len(points), len(seen)
    ours = np.zeros((n, len(every)))
    ours[np.arange(n), np.arange(n)] += 1.0
    ours[:, n] -= 1.0
    prior = np.einsum("ij,jk,ik->i", ours, alike, ours)
    mean = ours @ hopes
    if m:
        theirs = np.zeros((m, len(every)))
        theirs[np.arange(m), n + 1 + np.arange(m)] -= 1.0
        theirs[np.arange(m), n + 1 + m + np.arange(m)] += 1.0
        noise = np.array([max(one.error, LEAST_DOUBT) ** 2 for one in seen])
        between = ours @ alike @ theirs.T
        weights = np.linalg.solve(theirs @ alike @ theirs.T + np.diag(noise), between.T)
        mean = mean + weights.T @ (np.array([one.effect for one in seen]) - theirs @ hopes)
        prior = prior - np.einsum("ij,ji->i", between, weights)
    return [Guess(mean=float(a), spread=math.sqrt(max(0.0, float(b)))) for a, b in zip(mean, prior, strict=True)]


# --- parts -------------------------------------------------------------------------------------------------

Matrix = NDArray[np.float64]


def _scale(seen: Sequence[Seen]) -> float:
    """How much larger effects of settings are here than was thought; collapses alone shall not make all seem open."""
    if not seen:
        return 1.0
    return min(MOST, max(1.0, math.sqrt(sum(one.effect**2 for one in seen) / len(seen)) / ALONE))


def _alike(points: Sequence[Point], names: Sequence[str], topics: Mapping[str, frozenset[str]], alone: float) -> Matrix:
    """The kernel over all points."""
    single = [_alike_at([one.get(name, "") for one in points]) for name in names]
    total = np.zeros((len(points), len(points)))
    for one in single:
        total += alone**2 * one
    for (a, left), (b, right) in itertools.combinations(zip(names, single, strict=True), 2):
        both = RELATED if topics[a] & topics[b] else UNRELATED
        total += both**2 * left * right
    return total


def _alike_at(values: Sequence[str]) -> Matrix:
    """How alike the points are at one name."""
    numbers = [number(value) for value in values]
    if any(value is None or value < 0 for value in numbers):
        labels = np.array(values)
        equal: Matrix = (labels[:, None] == labels[None, :]).astype(float)
        return equal
    sizes = np.array(numbers, dtype=float)
    logs = np.log(sizes) if sizes.min() > 0 else np.log1p(sizes)
    near: Matrix = np.exp(-np.abs(logs[:, None] - logs[None, :]) / LENGTH)
    return near
