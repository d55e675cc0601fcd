"""What an experiment may spend: its share of the night's error, runs per launch, patience; pure numbers, no verdicts.

The night has one budget for false keeps. Each experiment gets an even part of what is left. A dismissed one gives back
the chance that it would still have been kept by luck had it gone on (a lower bound), one that was never measured gives
back all, and so does a keep: if it was true, its share was not needed, and if it was false, the night has failed
anyway (fallback: Tian and Ramdas, Online control of the familywise error rate, 2021). Keeps aside, what was spent plus
what is left never exceeds the budget in expectation, whatever came before: a martingale, so peeking does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from agent.judge.noise import Floats

PATIENT, HASTY = 0.25, 0.55
"""A candidate is hopeless when its chance of the minimal effect is below this: with time to spare, and with none."""

AMPLE_PAIRS, SCARCE_PAIRS = 4.0, 1.5
"""Launches of either side per experiment left that the remaining time pays: from ample to scarce."""

MOST_RUNS, PARENT_RUNS = 8, 4
"""Runs of the candidate in one launch at most, and of the parent at least: its runs serve later comparisons too."""

FEW_RUNS, OF_A_LAUNCH = 3, 0.75
"""More than a few runs are made only where all of them take at most this part of what the launch takes."""

MOST_LAUNCHES = 12
"""A candidate is launched no more often than this, however much time is left."""

LUCK_RATIO = 0.5
"""Launch spread over run spread that the number of runs per launch is planned for."""


def share_of(budget: float, earlier: Iterable[tuple[float, float]], left: int) -> float:
    """Error that the next of `left` experiments may spend; `earlier` are (share, given back) of those before."""
    spent = sum(share - back for share, back in earlier)
    return max(0.0, budget - spent) / max(1, left)


def runs_per_launch(launch_s: float, run_s: float, most: int) -> tuple[int, int]:
    """Runs that a launch of the candidate and of the parent should get at the objective's load points.

    The classic optimum of two-stage sampling: the dearer a launch and the smaller its own luck, the more runs. The
    parent gets more because its runs serve every later comparison too. Neither gets more than `most`.
    """
    best = math.sqrt(launch_s / max(run_s, 1e-9)) / LUCK_RATIO
    cheap = max(FEW_RUNS, int(OF_A_LAUNCH * launch_s / max(run_s, 1e-9)))
    runs = min(MOST_RUNS, cheap, max(2, round(best)))
    return min(most, runs), min(most, max(runs, PARENT_RUNS))


def more_launches(usual: int, left_s: float, pair_s: float) -> int:
    """The launches of a candidate that the time left pays, at least as many as usual and at most MOST_LAUNCHES."""
    paid = min(MOST_LAUNCHES, left_s / max(pair_s, 1e-9))
    return max(usual, int(paid))


def hopeless_below(left_s: Floats, experiments: int, pair_s: float) -> Floats:
    """The chance of the minimal effect below which going on isn't worth its cost: the scarcer the time, the higher."""
    pairs = left_s / max(1, experiments) / max(pair_s, 1e-9)
    scarcity = np.clip((AMPLE_PAIRS - pairs) / (AMPLE_PAIRS - SCARCE_PAIRS), 0.0, 1.0)
    level: Floats = PATIENT + (HASTY - PATIENT) * scarcity
    return level
