"""Recorded servers to search on: what each setting is worth, and what a launch or a run of it would show.

It must not know who searches. Everything is drawn from the recording: the truth is the pooled mean of a setting, the
luck of launches and runs is resampled from what repeats of one setting differed by, so its heavy tails stay, and start
times and failures are those that the setting itself showed.

A recording is either the whole grid or a menu: a reference and single values beside it. A combination that a menu
lacks is composed: it fails as the first of its values that fails by itself, else it starts as the slowest of its parts
and adds up their effects. That is no evidence of how values go together, only a larger place to search in.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.searching.pooling import Floats, Pooled, pooled
from benchmarks.searching.spaces import Setting, Space
from state.models import digest


@dataclass(frozen=True)
class Launched:
    """What came of a launch: seconds until it served, or until it ended with `failure`."""

    seconds: float
    failure: str | None


@dataclass(frozen=True)
class Ran:
    """What a run showed, how long its window was, and what it took beyond that."""

    tok_s: float
    measured_s: float
    idle_s: float

    @property
    def seconds(self) -> float:
        """The whole of it."""
        return self.measured_s + self.idle_s

    @property
    def log_tok_s(self) -> float:
        """What objectives are made of."""
        return math.log(self.tok_s)


@dataclass(frozen=True)
class Luck:
    """Logarithms to draw from: a launch's own, which all its runs share, and a run's at each load point."""

    launch: Floats
    run: Mapping[str, Floats]


class Surface(Space):
    """One recorded server."""

    def __init__(self, name: str, space: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(name, space)
        self.mark = digest([space, list(launches)], 8)
        self.starts: dict[Setting, list[Launched]] = {}
        for row in launches:
            failure = row["failure"]["cause"] if "failure" in row else None
            if row["start_s"] is not None:
                self.starts.setdefault(tuple(row["setting"]), []).append(Launched(row["start_s"], failure))
        up = [row for row in launches if "failure" not in row]
        self.pooled = {point.name: _pooled(up, point.name) for point in self.points}
        self.luck = _luck(up, [point.name for point in self.points])
        self.idle_s = {point.name: _idle_s(up, point.name) for point in self.points}
        self.composed: frozenset[Setting] = frozenset()
        if "reference" in space:
            self.composed = self._compose(tuple(space["reference"]))

    # --- what is true --------------------------------------------------------------------------------------

    def log_tok_s(self, setting: Setting, point: str) -> float | None:
        """The truth at one load point; None for what never serves."""
        return self.pooled[point].estimate.get(setting)

    def truth(self, setting: Setting) -> float | None:
        """The objective: mean log tok/s over the load points."""
        return self._mean(setting, lambda one: one.estimate)

    def raw(self, setting: Setting) -> float | None:
        """The same from the setting's own runs alone."""
        return self._mean(setting, lambda one: one.raw)

    def best(self) -> Setting:
        """What an oracle would end with."""
        return max((one for one in self.settings if self.truth(one) is not None), key=lambda one: self.truth(one) or 0)

    def _compose(self, reference: Setting) -> frozenset[Setting]:
        """Add what a menu lacks."""
        missing = frozenset(setting for setting in self.settings if setting not in self.starts)
        for setting in missing:
            turned = [at for at, value in enumerate(setting) if value != reference[at]]
            parts = [(*reference[:at], setting[at], *reference[at + 1 :]) for at in turned]
            failing = [part for part in parts if self.starts[part][0].failure is not None]
            slowest = max(parts, key=self._start_s)
            self.starts[setting] = self.starts[failing[0] if failing else slowest]
            if failing:
                continue
            for one in self.pooled.values():
                for told in (one.raw, one.estimate):
                    told[setting] = told[reference] + sum(told[part] - told[reference] for part in parts)
        return missing

    @property
    def slowest_start_s(self) -> float:
        """The longest that any launch took until it served."""
        served = (launch.seconds for launches in self.starts.values() for launch in launches if not launch.failure)
        return max(served)

    def _start_s(self, setting: Setting) -> float:
        return max(launch.seconds for launch in self.starts[setting])

    def _mean(self, setting: Setting, which: Any) -> float | None:
        values = [which(self.pooled[point.name]).get(setting) for point in self.points]
        return None if None in values else float(np.mean(values))

    # --- what a launch and a run would show ----------------------------------------------------------------

    def launch(self, setting: Setting, seed: str) -> Launched:
        """One of the setting's recorded launches."""
        return _random(seed, "launch").choice(self.starts[setting])

    def run(self, setting: Setting, point: str, launch: str, run: str) -> Ran:
        """A run on a launch; the names of both are the seeds of their luck."""
        known = self.log_tok_s(setting, point)
        assert known is not None, f"{setting} does not serve"
        value = known + _random(launch, "luck").choice(self.luck.launch)
        value += _random(launch, run, point).choice(self.luck.run[point])
        load = next(one for one in self.points if one.name == point)
        tok_s = math.exp(value)
        return Ran(tok_s, load.requests * load.output_tokens / tok_s, self.idle_s[point])


def load(space: Path, launches: Path) -> Surface:
    """A surface from its two files."""
    rows = [json.loads(line) for line in launches.read_text().splitlines()]
    return Surface(space.name.removesuffix("_space.json"), json.loads(space.read_text()), rows)


def _counted(row: Mapping[str, Any], point: str) -> Mapping[str, Any] | None:
    """A launch's run at a point that a session would count; a void one only where there is no other."""
    runs: list[Mapping[str, Any]] = [run for run in row["runs"] if run["point"] == point and run["tok_s"]]
    valid = [run for run in runs if not run["void"]]
    return ([None, *runs, *valid])[-1]


def _pooled(up: Sequence[Mapping[str, Any]], point: str) -> Pooled:
    found = [(tuple(row["setting"]), run["tok_s"]) for row in up if (run := _counted(row, point)) is not None]
    return pooled([setting for setting, _ in found], [math.log(tok_s) for _, tok_s in found])


def _luck(up: Sequence[Mapping[str, Any]], points: Sequence[str]) -> Luck:
    """What launches of one setting differ by at each load point, split into what all points share and the rest.

    The shared variance is the mean covariance between two points, and each part is the recorded differences, scaled to
    its variance. Deviations from a mean of n are too small by √(n / (n - 1)).
    """
    apart = _deviations(up, points)
    variances = np.mean(apart**2, axis=0)
    products = apart.T @ apart / len(apart)
    pairs = ~np.eye(len(points), dtype=bool)
    shared = float(np.clip(products[pairs].mean() if pairs.any() else 0.0, 0.0, variances.min()))
    common = apart.mean(axis=1)
    launch = common * np.sqrt(shared / max(float(np.mean(common**2)), 1e-12))
    rest = np.sqrt((variances - shared) / np.maximum(variances, 1e-12))
    return Luck(launch=launch, run={point: apart[:, at] * rest[at] for at, point in enumerate(points)})


def _deviations(up: Sequence[Mapping[str, Any]], points: Sequence[str]) -> Floats:
    cells: dict[Setting, list[list[float]]] = {}
    for row in up:
        runs = [_counted(row, point) for point in points]
        logs = [math.log(run["tok_s"]) for run in runs if run is not None]
        if len(logs) == len(points):
            cells.setdefault(tuple(row["setting"]), []).append(logs)
    repeated = [np.array(rows) for rows in cells.values() if len(rows) > 1]
    if not repeated:
        raise ValueError("no setting was launched twice: nothing is known of the noise")
    return np.concatenate([(one - one.mean(axis=0)) * np.sqrt(len(one) / (len(one) - 1)) for one in repeated])


def _idle_s(up: Sequence[Mapping[str, Any]], point: str) -> float:
    """What a run takes beyond its own measured window."""
    runs = [run for row in up if (run := _counted(row, point)) is not None]
    return float(np.median([run["wall_s"] - run["duration_s"] for run in runs]))


def _random(*names: str) -> random.Random:
    return random.Random(hashlib.sha256("/".join(names).encode()).digest())
