"""Measurements and comparisons made by hand or drawn at random, for tests of judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.judge import Assessment, Comparison, Need, assess, log_tok_s
from state.models import (
    Arm,
    JudgeRule,
    LoadPoint,
    Measurement,
    MeasurementStatus,
    Metrics,
    Objective,
    Summary,
    Verdict,
    Workload,
)

LOW = LoadPoint(name="low", concurrency=1, requests=4)
HIGH = LoadPoint(name="high", concurrency=8, requests=16)
WORKLOAD = Workload(load_points=(LOW, HIGH), objective=Objective(at=("high",)))
ONE_POINT = Workload(load_points=(HIGH,), objective=Objective(at=("high",)))
RULE = JudgeRule()
QUIET = JudgeRule(noise_prior=0.005)


def metrics(tok_s: float, **fields: Any) -> Metrics:
    """Figures of a run in which everything went well."""
    whole = {"requested": 16, "completed": 16, "failed": 0, "duration_s": 10.0, "output_tok_s": tok_s}
    return Metrics.model_validate(whole | {"output_tokens": round(10 * tok_s)} | fields)


def taken(arm: Arm, block: int, point: str, tok_s: float, experiment: str = "x", **fields: Any) -> Measurement:
    """One valid run; each block is a launch of its own."""
    launch = f"{experiment}-{arm.value}-{block}"
    whole = {"experiment_id": experiment, "trial_id": launch, "arm": arm, "block": block, "load_point": point}
    whole |= {"id": f"{launch}-{point}", "seed": 1, "status": MeasurementStatus.VALID, "metrics": metrics(tok_s)}
    return Measurement.model_validate(whole | fields)


def block(arm: Arm, number: int, high: float = 100.0, low: float = 50.0) -> tuple[Measurement, ...]:
    """One launch, measured at both load points."""
    return (taken(arm, number, "high", high), taken(arm, number, "low", low))


def candidate(number: int, high: float = 100.0, low: float = 50.0) -> tuple[Measurement, ...]:
    """A launch of the candidate."""
    return block(Arm.CANDIDATE, number, high, low)


def baseline(number: int, high: float = 100.0, low: float = 50.0) -> tuple[Measurement, ...]:
    """A launch of the parent made for this experiment."""
    return block(Arm.BASELINE, number, high, low)


def record(runs: int = 4, high: float = 100.0, low: float = 50.0) -> tuple[Measurement, ...]:
    """What one launch of the parent showed before the experiment began."""
    rows = [(n, name, tok_s) for n in range(runs) for name, tok_s in (("high", high), ("low", low))]
    return tuple(
        taken(Arm.BASELINE, n, name, tok_s, experiment="baseline", trial_id="adopted") for n, name, tok_s in rows
    )


def with_latency(run: Measurement, name: str, p90: float) -> Measurement:
    """The same run with a 90th percentile of `ttft_ms` or `tpot_ms`."""
    assert run.metrics is not None
    return run.model_copy(update={"metrics": run.metrics.model_copy(update={name: Summary(p90=p90)})})


def groups_of(*runs: Measurement) -> tuple[tuple[str, str, float], ...]:
    """The noise groups that a session makes of these runs: one per load point and spec."""
    return tuple(
        (run.load_point, "parent" if run.arm is Arm.BASELINE else run.experiment_id, value)
        for run in runs
        if (value := log_tok_s(run)) is not None
    )


def compare(*own: Measurement, before: tuple[Measurement, ...] = (), **fields: Any) -> Comparison:
    """A comparison of the session's only experiment."""
    whole = {"experiment_id": "x", "workload": WORKLOAD, "rule": RULE, "share": 1, "own": own, "record": before}
    return Comparison.model_validate(whole | {"groups": groups_of(*before, *own)} | fields)


def verdict_of(comparison: Comparison) -> Verdict:
    """The verdict, where the test says that there is one."""
    said = assess(comparison)
    assert said.verdict is not None, f"no verdict, wants {said.need}"
    return said.verdict


def need_of(comparison: Comparison) -> Need:
    """The wanted run, where the test says that there is no verdict yet."""
    said = assess(comparison)
    assert said.need is not None, f"no run is wanted, said {said.verdict}"
    return said.need


def wanted(need: Need) -> str:
    """`C0 high`: arm, block and load point in short."""
    return f"{need.arm.value[0].upper()}{need.block} {need.load_point}"


def played(speeds: Mapping[str, float], limit: int = 50, **fields: Any) -> tuple[list[str], Assessment]:
    """Make the runs that the judge asks for until it speaks; `speeds` by `C high`; the wishes and the last word."""
    own: tuple[Measurement, ...] = ()
    wishes: list[str] = []
    while len(wishes) < limit:
        said = assess(compare(*own, **fields))
        if said.need is None:
            return wishes, said
        need = said.need
        wishes.append(wanted(need))
        speed = speeds[f"{wishes[-1][0]} {need.load_point}"]
        own = (*own, taken(need.arm, need.block, need.load_point, speed))
    raise AssertionError(f"no end after {wishes}")


@dataclass
class Night:
    """One random night at one load point: run noise and launch noise as log-spreads, every run remembered."""

    seed: int
    run_noise: float
    launch_noise: float = 0.0
    share: int = 10
    rule: JudgeRule = RULE
    runs: tuple[Measurement, ...] = ()
    launches: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the observation of what runs."""
        self.rng = np.random.default_rng(self.seed)
        for n in range(self.rule.baseline_runs):
            self._measure(Need(arm=Arm.BASELINE, block=n, load_point="high"), "baseline", 0.0, trial="adopted")

    def judged(self, experiment: str, gain: float = 0.0) -> Verdict:
        """Make the runs that the judge wants of an experiment whose true effect is `gain`, a fraction."""
        before = tuple(run for run in self.runs if run.arm is Arm.BASELINE)
        while True:
            own = tuple(run for run in self.runs if run.experiment_id == experiment)
            comparison = Comparison(
                experiment_id=experiment,
                workload=ONE_POINT,
                rule=self.rule,
                share=self.share,
                own=own,
                record=before,
                groups=groups_of(*self.runs),
            )
            said = assess(comparison)
            if said.verdict is not None:
                return said.verdict
            assert said.need is not None
            self._measure(said.need, experiment, gain)

    def _measure(self, need: Need, experiment: str, gain: float, trial: str | None = None) -> None:
        launch = trial or f"{experiment}-{need.arm.value}-{need.block}"
        if launch not in self.launches:
            self.launches[launch] = self.rng.normal(0.0, self.launch_noise)
        effect = math.log1p(gain) if need.arm is Arm.CANDIDATE else 0.0
        value = effect + self.launches[launch] + self.rng.normal(0.0, self.run_noise)
        run = taken(need.arm, need.block, need.load_point, 100 * math.exp(value), experiment, trial_id=launch)
        self.runs = (*self.runs, run)
