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
AT_A_TIME = 2_000_000
"""So many numbers are held at a time: a large catalogue has tens of thousands of pairs of settings."""


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
    known = [over, *(one.base for one in seen), *(one.to for one in seen)]
    kernel = _Kernel([*points, *known], names, topics, ALONE * _scale(seen))
    n, m = len(points), len(seen)
    before, after = np.arange(1, m + 1), np.arange(m + 1, 2 * m + 1)
    among = kernel.between(np.arange(n, n + len(known)), np.arange(n, n + len(known)))
    seen_of_known = among[:, after] - among[:, before]
    noise = np.array([max(one.error, LEAST_DOUBT) ** 2 for one in seen])
    covariance = seen_of_known[after] - seen_of_known[before] + np.diag(noise)
    surprise = np.array([one.effect - hope(one.to) + hope(one.base) for one in seen])
    factor = np.linalg.inv(np.linalg.cholesky(covariance)) if m else covariance
    expected = factor.T @ (factor @ surprise)
    found: list[Guess] = []
    for first in range(0, n, step := max(1, AT_A_TIME // (len(names) * len(known) or 1))):
        rows = np.arange(first, min(first + step, n))
        to_known = kernel.between(rows, np.arange(n, n + len(known)))
        between = to_known[:, after] - to_known[:, before] - seen_of_known[0]
        mean = np.array([hope(one) - hope(over) for one in points[first : first + step]]) + between @ expected
        alone = kernel.itself + among[0, 0] - 2 * to_known[:, 0]
        left = alone - np.square(between @ factor.T).sum(axis=1)
        found += [Guess(mean=float(a), spread=math.sqrt(max(0.0, float(b)))) for a, b in zip(mean, left, strict=True)]
    return found


# --- parts -------------------------------------------------------------------------------------------------

Matrix = NDArray[np.float64]


def _scale(seen: Sequence[Seen]) -> float:
    """How much larger effects of settings are here than was thought; collapses alone shall not make all seem open."""
    if not seen:
        return 1.0
    return min(MOST, max(1.0, math.sqrt(sum(one.effect**2 for one in seen) / len(seen)) / ALONE))


class _Kernel:
    """How alike configurations are, by their places in a list; of all pairs only those that are asked for."""

    def __init__(
        self, points: Sequence[Point], names: Sequence[str], topics: Mapping[str, frozenset[str]], alone: float
    ) -> None:
        self.alone = alone
        self.codes: list[NDArray[np.intp]] = []
        self.tables: list[Matrix] = []
        for name in names:
            values = [one.get(name, "") for one in points]
            distinct = {value: code for code, value in enumerate(dict.fromkeys(values))}
            self.codes.append(np.array([distinct[value] for value in values], dtype=np.intp))
            self.tables.append(_alike_at([*distinct]))
        self.both = np.zeros((len(names), len(names)))
        for (a, left), (b, right) in itertools.combinations(enumerate(names), 2):
            self.both[a, b] = (RELATED if topics[left] & topics[right] else UNRELATED) ** 2
        self.itself = float(alone**2 * len(names) + self.both.sum())

    def between(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Matrix:
        """The kernel of some points with others."""
        shape = (len(rows), len(columns))
        single = np.empty((len(self.codes), *shape))
        for place, (codes, table) in enumerate(zip(self.codes, self.tables, strict=True)):
            single[place] = table[codes[rows][:, None], codes[columns][None, :]]
        flat = single.reshape(len(self.codes), len(rows) * len(columns))
        total: Matrix = self.alone**2 * flat.sum(axis=0) + (flat * (self.both @ flat)).sum(axis=0)
        return total.reshape(shape)


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
