"""What this host would measure: figures, effects and noise from one JSON file; it knows no clock and no chance.

All luck comes from the scenario's seed with the numbers of the launch and of the run, so a story repeats itself.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

HOST = "SIMULATED_HOST"
"""Variable that names the folder of the host: its scenario, its witness and the state of its GPUs."""


def folder() -> Path:
    """The host's folder."""
    return Path(os.environ[HOST])


class Scenario:
    """The numbers of one host."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    @classmethod
    def read(cls) -> Scenario:
        """That of this host."""
        return cls(json.loads((folder() / "scenario.json").read_text()))

    def failure(self, in_force: Collection[str]) -> str | None:
        """The name of the failure that a start with this in force ends with."""
        found = (name for name, when in self.told["failures"].items() if set(when) & set(in_force))
        return next(found, None)

    def factor(self, in_force: Collection[str], concurrency: int) -> float:
        """By how much all that is in force multiplies the throughput at a concurrency."""
        effects = self._effects(in_force)
        return math.prod(effect.get("at", {}).get(str(concurrency), effect["factor"]) for effect in effects)

    def output_tok_s(self, in_force: Collection[str], load: dict[str, int], launch: int, run: int) -> float:
        """What one run of one launch measures."""
        concurrency = load["concurrency"]
        share = load["output_tokens"] / (load["prompt_tokens"] + load["output_tokens"])
        luck = random.Random(f"{self.told['seed']}/{launch}").gauss(0, self.told["launch_noise"])
        luck += random.Random(f"{self.told['seed']}/{launch}/{concurrency}/{run}").gauss(0, self.told["run_noise"])
        return share * self._total_tok_s(concurrency) * self.factor(in_force, concurrency) * math.exp(luck)

    def seconds(self, in_force: Collection[str], concurrency: int) -> float:
        """How long a run really takes here, which its figures do not show; a slow one takes longer."""
        usual: float = self.told["run_s"].get(str(concurrency), self.told["run_s"]["else"])
        return usual / min(1.0, max(0.1, self.factor(in_force, concurrency)))

    def power_w(self, in_force: Collection[str]) -> float:
        """What each GPU draws under load."""
        told = [effect["power_w"] for effect in self._effects(in_force) if "power_w" in effect]
        return float(min([*told, self.told["power_w"]]))

    def _effects(self, in_force: Collection[str]) -> list[dict[str, Any]]:
        return [effect for name, effect in self.told["effects"].items() if name in in_force]

    def _total_tok_s(self, concurrency: int) -> float:
        """Prompt and output tokens per second before any change, between two known levels along a power law."""
        known = sorted((int(level), float(rate)) for level, rate in self.told["total_tok_s"].items())
        below = [pair for pair in known if pair[0] <= concurrency] or known[:1]
        above = [pair for pair in known if pair[0] >= concurrency] or known[-1:]
        (low, slow), (high, fast) = below[-1], above[0]
        if low == high:
            return slow
        return float(slow * (fast / slow) ** (math.log(concurrency / low) / math.log(high / low)))
