"""How a model's guesses are held against what was measured."""

from __future__ import annotations

import math

from agent.calibration import Guess, calibration
from state.models import Effect


def guess(hoped: float, low: float, measured: float, high: float) -> Guess:
    logs = {name: math.log1p(gain) for name, gain in (("low", low), ("estimate", measured), ("high", high))}
    effect = Effect(**logs, n_baseline=4, n_candidate=4, launches_baseline=2, launches_candidate=2)
    return Guess(experiment_id="model-1", hoped=hoped, effect=effect)


def test_one_sentence_says_how_many_fit_and_how_far_off_they_are() -> None:
    told = calibration([guess(0.10, 0.05, 0.08, 0.12), guess(0.50, -0.02, 0.0, 0.02)])
    assert told == (
        "of 2 guesses 1 lie in the measured interval; hoped for +30.0% on average, measured +4.0%, "
        "off by 26.0 points on average"
    )


def test_without_a_measured_guess_nothing_is_claimed() -> None:
    assert calibration([]) == "none of its guesses can be compared with a measurement"
