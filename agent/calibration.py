"""How well a language model's guesses fit what was measured; pure, and it must not read the store."""

from __future__ import annotations

import math
from collections.abc import Sequence

from state.models import Effect, Frozen


class Guess(Frozen):
    """One experiment's hoped gain and what the judge found."""

    experiment_id: str
    hoped: float
    effect: Effect

    @property
    def measured(self) -> float:
        """The measured gain as a fraction."""
        return math.expm1(self.effect.estimate)

    @property
    def fits(self) -> bool:
        """Whether the hoped gain lies in the measured interval."""
        return math.expm1(self.effect.low) <= self.hoped <= math.expm1(self.effect.high)


def calibration(guesses: Sequence[Guess]) -> str:
    """One sentence on all guesses that can be compared."""
    if not guesses:
        return "none of its guesses can be compared with a measurement"
    hoped = sum(guess.hoped for guess in guesses) / len(guesses)
    measured = sum(guess.measured for guess in guesses) / len(guesses)
    off = sum(abs(guess.hoped - guess.measured) for guess in guesses) / len(guesses)
    fit = sum(guess.fits for guess in guesses)
    return (
        f"of {len(guesses)} guesses {fit} lie in the measured interval; hoped for {hoped:+.1%} on average, "
        f"measured {measured:+.1%}, off by {100 * off:.1f} points on average"
    )
