"""How sure a look must be: group-sequential boundaries that spend one candidate's share of the error over its looks.

Pure numbers. The test statistic of a candidate that makes no difference walks like a Brownian motion over its looks,
so the chance that any look crosses its boundary follows by integrating from look to look (Armitage, McPherson and Rowe
1969). All looks of a candidate get the same one-sided level (Pocock 1977).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from agent.judge.noise import Floats

GRID = np.linspace(-6.0, 6.0, 201)
SHARES = np.exp(np.linspace(np.log(1e-6), np.log(0.3), 15))


class Looks(NamedTuple):
    """After which launches of the candidate a look may keep: from the `first` to the `last`."""

    first: int
    last: int


def chance_to_cross(z: float, looks: Looks) -> float:
    """Chance that pure noise exceeds `z` standard errors at any of the looks."""
    information = np.arange(looks.first, looks.last + 1) / looks.last
    root = np.sqrt(information)
    at = GRID * root[0]
    density = np.exp(-0.5 * GRID**2) / np.sqrt(2 * np.pi) / root[0]
    crossed = float(special.ndtr(-z))
    for n in range(1, len(information)):
        below = np.linspace(at[0], z * root[n - 1], len(GRID))
        mass = np.interp(below, at, density) * (below[1] - below[0])
        mass[[0, -1]] /= 2
        step = np.sqrt(information[n] - information[n - 1])
        crossed += float(np.sum(mass * special.ndtr((below - z * root[n]) / step)))
        at = GRID * root[n]
        density = np.exp(-0.5 * ((at[:, None] - below) / step) ** 2) @ mass / (step * np.sqrt(2 * np.pi))
    return crossed


@lru_cache(maxsize=16)
def _levels(looks: Looks) -> Floats:
    """Log level of one look for each of SHARES."""

    def level(share: float) -> float:
        z = optimize.brentq(lambda z: np.log(chance_to_cross(z, looks) / share), 0.3, 9.0, xtol=1e-5)
        return float(np.log(special.ndtr(-z)))

    return np.array([level(float(share)) for share in SHARES])


def look_level(share: Floats, looks: Looks) -> Floats:
    """One-sided level of each look when all looks of a candidate together may err with chance `share`."""
    inside = np.clip(share, SHARES[0], SHARES[-1])
    level: Floats = np.exp(np.interp(np.log(inside), np.log(SHARES), _levels(looks))) * share / inside
    return level


def chance_of_keep(chance: Floats, launches: Floats, level: Floats, looks: Looks) -> Floats:
    """The chance of a keep at the last look if the effect is exactly what it looks like now."""
    information, z = _progress(chance, launches, looks)
    left = np.sqrt(np.maximum(1 - information, 1e-12))
    keep: Floats = special.ndtr((z / np.sqrt(np.maximum(information, 1e-12)) + special.ndtri(level)) / left)
    return keep


def still_to_err(chance: Floats, launches: Floats, level: Floats, share: Floats, looks: Looks) -> Floats:
    """Lower bound of the chance that noise would still be kept at the last look, had the candidate not been dismissed.

    `chance` is the present chance of no gain. This is what a dismissal gives back to the night (conditional error:
    Müller and Schäfer 2001); it never exceeds the share.
    """
    information, z = _progress(chance, launches, looks)
    left = np.sqrt(np.maximum(1 - information, 1e-12))
    missing = -special.ndtri(level) - z * np.sqrt(information)
    error: Floats = np.where(information < 1, special.ndtr(-missing / left), 0.0)
    return np.minimum(error, share)


def _progress(chance: Floats, launches: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Share of the launches that may be made, and standard errors of the effect above zero."""
    information = np.minimum(launches / looks.last, 1.0)
    return information, -special.ndtri(np.clip(chance, 1e-300, 1 - 1e-16))
