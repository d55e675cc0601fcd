"""Measurements and comparisons made by hand or drawn at random, for tests of judgement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.judge import Assessment, Comparison, Need, Seen, assess, figures, log_of
from agent.judge.noise import Floats, Indices
from agent.judge.rehearsal import World
from state.models import (
    Arm,
    Guards,
    JudgeRule,
    LoadPoint,
    Measurement,
    MeasurementStatus,
    Metrics,
    Objective,
    Outcome,
    Summary,
    Verdict,
    Workload,
)

LOW = LoadPoint(name="low", concurrency=1, requests=4)
HIGH = LoadPoint(name="high", concurrency=8, requests=16)
WORKLOAD = Workload(load_points=(LOW, HIGH), objective=Objective(at=("high",)))
ONE_POINT = Workload(load_points=(HIGH,), objective=Objective(at=("high",)))
RULE = JudgeRule()
FIGURES = figures(
    Workload(load_points=(LOW,), objective=Objective(at=("low",)), guards=Guards(ttft_p90_ms=1.0, tpot_p90_ms=1.0))
)
ONLY = np.array([0])
QUIET = JudgeRule(noise_prior=0.002)


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


def seen(*runs: Measurement, epoch: int = 0) -> tuple[Seen, ...]:
    """What later experiments learn from these runs."""
    return tuple(
        Seen(
            experiment_id=run.experiment_id,
            epoch=epoch,
            launch=run.trial_id,
            arm=run.arm,
            load_point=run.load_point,
            logs=logs,
        )
        for run in runs
        if (logs := {name: value for name in FIGURES if (value := log_of(run, name)) is not None})
    )


def compare(*own: Measurement, before: tuple[Measurement, ...] = (), **fields: Any) -> Comparison:
    """A comparison of the session's only experiment."""
    whole = {"experiment_id": "x", "workload": WORKLOAD, "rule": RULE, "own": own, "record": before}
    return Comparison.model_validate(whole | {"night": seen(*before)} | fields)


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


def wish(need: Need, tok_s: float, experiment: str = "x", **fields: Any) -> Measurement:
    """The run that was asked for."""
    name = f"{experiment}-{need.arm.value}-{need.block}-{need.run}-{need.load_point}"
    whole = {"id": name, "run": need.run} | fields
    return taken(need.arm, need.block, need.load_point, tok_s, experiment, **whole)


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
        own = (*own, wish(need, speed))
    raise AssertionError(f"no end after {wishes}")


@dataclass
class Night:
    """One night at one load point, judged as a session judges it: run by run, from stored measurements."""

    world: World
    experiments: int
    rule: JudgeRule = RULE
    runs: tuple[Measurement, ...] = ()
    night: tuple[Seen, ...] = ()
    earlier: tuple[tuple[float, float], ...] = ()
    level: float = 0.0
    epoch: int = 0
    fresh: bool = False
    judged: int = 0

    def __post_init__(self) -> None:
        """Begin with the observation of what runs."""
        self.world.launch(ONLY)
        own = tuple(
            self._measured(Need(arm=Arm.BASELINE, block=0, load_point="high", run=n), "baseline", 0.0)
            for n in range(self.rule.baseline_runs)
        )
        self.night = seen(*own)

    def judge(self, gain: float = 0.0) -> Verdict:
        """Make the runs that the judge wants of the next experiment, whose true effect is `gain`, a fraction."""
        experiment = f"e{self.judged}"
        own: tuple[Measurement, ...] = ()
        serving = (Arm.BASELINE, 0)
        while True:
            comparison = Comparison(
                experiment_id=experiment,
                workload=ONE_POINT,
                rule=self.rule,
                own=own,
                night=self.night,
                epoch=self.epoch,
                left=self.experiments - self.judged,
                earlier=self.earlier,
                fresh=self.fresh,
            )
            said = assess(comparison)
            if said.verdict is not None:
                return self._settled(said.verdict, own, math.log1p(gain))
            assert said.need is not None
            need = said.need
            if (need.arm, need.block) != serving:
                self.world.launch(ONLY)
            serving = (need.arm, need.block)
            own = (*own, self._measured(need, experiment, math.log1p(gain)))

    def _settled(self, verdict: Verdict, own: tuple[Measurement, ...], effect: float) -> Verdict:
        """What a session does after a verdict: the winner or the parent is brought up."""
        kept = verdict.outcome is Outcome.BETTER
        self.fresh = own[-1].arm is Arm.CANDIDATE
        if kept or self.fresh:
            self.world.launch(ONLY)
        self.night = (*self.night, *seen(*own, epoch=self.epoch))
        self.earlier = (*self.earlier, (float(verdict.rule["share"]), float(verdict.rule["given_back"])))
        self.level += effect if kept else 0.0
        self.epoch += kept
        self.judged += 1
        self.runs = (*self.runs, *own)
        return verdict

    def _measured(self, need: Need, experiment: str, effect: float) -> Measurement:
        total = self.level + (effect if need.arm is Arm.CANDIDATE else 0.0)
        value = float(self.world.run(ONLY, np.array([total]))[0])
        return wish(need, math.exp(value), experiment)


class Server:
    """A made-up server: run noise and launch noise as log-spreads."""

    def __init__(self, seed: int, nights: int, run_noise: float, launch_noise: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.spreads = (run_noise, launch_noise)
        self.luck = np.zeros(nights)

    def launch(self, nights: Indices) -> None:
        """Draw the luck of a launch."""
        self.luck[nights] = self.spreads[1] * self.rng.standard_normal(len(nights))

    def run(self, nights: Indices, effect: Floats) -> Floats:
        """Log tok/s of one run."""
        drawn: Floats = 4.6 + effect + self.luck[nights] + self.spreads[0] * self.rng.standard_normal(len(nights))
        return drawn
