"""Noise for rehearsals: made up to stated figures, or drawn from recorded runs; it must not know any judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEVEL = 4.6
"""Log of 100 tok/s; nothing depends on it."""


@dataclass(frozen=True)
class Noise:
    """Spreads are log standard deviations; `memory` is the correlation of a run's luck with that of the run before."""

    run: float
    launch: float
    heavy: bool = False
    memory: float = 0.0
    drift: float = 0.0

    @property
    def text(self) -> str:
        """`2 % + 1 %, t3`."""
        extras = ["t3"] * self.heavy + [f"memory {self.memory}"] * bool(self.memory) + ["drift"] * bool(self.drift)
        return ", ".join([f"{100 * self.run:g} % + {100 * self.launch:g} %", *extras])


class MadeUp:
    """A server with the stated noise; over `launches` launches it gets faster by `drift`."""

    def __init__(self, noise: Noise, nights: int, launches: float, seed: int) -> None:
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.luck = self._draw(nights)
        self.launch_luck = np.zeros(nights)
        self.launches = np.zeros(nights)
        self.length = launches

    def launch(self, nights: Indices) -> None:
        """New luck for these nights."""
        self.launch_luck[nights] = self.noise.launch * self._draw(len(nights))
        self.launches[nights] += 1

    def run(self, nights: Indices, effect: Floats) -> Floats:
        """Log tok/s of one run."""
        memory = self.noise.memory
        self.luck[nights] = memory * self.luck[nights] + np.sqrt(1 - memory**2) * self._draw(len(nights))
        drifted = self.noise.drift * self.launches[nights] / self.length
        return LEVEL + effect + drifted + self.launch_luck[nights] + self.noise.run * self.luck[nights]

    def _draw(self, count: int) -> Floats:
        """Luck of unit variance; Student's t with three degrees of freedom has variance 3."""
        if self.noise.heavy:
            return self.rng.standard_t(3, count) / np.sqrt(3)
        return self.rng.standard_normal(count)


class Recorded:
    """A server whose luck is drawn from what was recorded: runs within launches, and launches where there are more."""

    def __init__(self, launches: list[list[float]], nights: int, seed: int) -> None:
        logs = [np.log(np.array(runs)) for runs in launches]
        spread = [(runs - runs.mean()) * np.sqrt(len(runs) / (len(runs) - 1)) for runs in logs if len(runs) > 1]
        self.run_luck = np.concatenate(spread)
        means = np.array([runs.mean() for runs in logs])
        many = len(means) > 1
        self.luck_of_launches = (means - means.mean()) * np.sqrt(len(means) / (len(means) - 1)) if many else means * 0
        self.rng = np.random.default_rng(seed)
        self.launch_luck = np.zeros(nights)

    def launch(self, nights: Indices) -> None:
        """One of the recorded launches."""
        self.launch_luck[nights] = self.rng.choice(self.luck_of_launches, len(nights))

    def run(self, nights: Indices, effect: Floats) -> Floats:
        """One of the recorded runs."""
        drawn: Floats = LEVEL + effect + self.launch_luck[nights] + self.rng.choice(self.run_luck, len(nights))
        return drawn
