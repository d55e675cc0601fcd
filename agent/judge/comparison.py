"""The words between the judge and the loop: what it may look at, what it wants next; data only, no judgement."""

from __future__ import annotations

import math

from pydantic import SkipValidation

from state.models import (
    Answer,
    Arm,
    Frozen,
    JudgeRule,
    LoadPoint,
    Measurement,
    MeasurementStatus,
    Purpose,
    Verdict,
    Workload,
)


class Need(Frozen):
    """The next run that the judge wants: this arm, in its `block`-th launch, the `run`-th at this load point."""

    arm: Arm
    block: int
    load_point: str
    run: int = 0


class Assessment(Frozen):
    """Either the next run or the verdict, never both."""

    need: Need | None = None
    verdict: Verdict | None = None


class Seen(Frozen):
    """A valid run of an earlier experiment; only what noise, drift and the parent's level are learned from.

    `logs`: the logarithm of each figure that is judged, by its name.
    """

    experiment_id: str
    epoch: int
    launch: str
    arm: Arm
    load_point: str
    logs: dict[str, float]


class Prices(Frozen):
    """What launches and runs cost on this host, and the time that is left for comparisons."""

    launch_s: float = 30.0
    run_s: float = 20.0
    left_s: float = math.inf


class Comparison(Frozen):
    """All that the judge may look at.

    `own` are the experiment's measurements, `record` valid earlier runs of the parent in this epoch, `night` all valid
    runs of earlier experiments, oldest first. `left` experiments may still be judged, this one included, and `foreseen`
    are those that may still come on the list; `earlier` are share and return of those judged before. `fresh`: a launch
    of the parent serves that was not measured yet. `complaint`: what the candidate's own log says against it under
    load, once no further try is due. `numerics`: the answers must be compared. `repeats`: the same came to no clear end
    before. Answers: a pass over the fixed prompts each, oldest first.

    Runs are taken as they are: each was checked when it was read, and there may be thousands of them.
    """

    experiment_id: str
    workload: Workload
    rule: JudgeRule
    own: SkipValidation[tuple[Measurement, ...]]
    record: SkipValidation[tuple[Measurement, ...]] = ()
    night: SkipValidation[tuple[Seen, ...]] = ()
    epoch: int = 0
    left: int = 1
    foreseen: int = 0
    earlier: SkipValidation[tuple[tuple[float, float], ...]] = ()
    prices: Prices = Prices()
    fresh: bool = False
    start_failure: str | None = None
    complaint: str | None = None
    failed_launches: tuple[str, ...] = ()
    purpose: Purpose = Purpose.TRY
    observes: bool = False
    numerics: bool = False
    repeats: bool = False
    parent_answers: tuple[tuple[Answer, ...], ...] = ()
    candidate_answers: tuple[tuple[Answer, ...], ...] = ()


RATE = "output_tok_s"
"""The figure that is maximised; latencies under a ceiling have names such as `ttft_p90_ms`."""


def log_of(measurement: Measurement, figure: str) -> float | None:
    """Log of one figure of a run, None unless the run is valid and the figure positive."""
    metrics = measurement.metrics
    if measurement.status is not MeasurementStatus.VALID or metrics is None:
        return None
    if figure == RATE:
        value = metrics.output_tok_s
    else:
        latency, percentile, unit = figure.split("_")
        value = getattr(getattr(metrics, f"{latency}_{unit}"), percentile)
    return math.log(value) if value else None


def log_tok_s(measurement: Measurement) -> float | None:
    """Log of the run's output tok/s, None unless it is valid and positive."""
    return log_of(measurement, RATE)


def figures(workload: Workload) -> tuple[str, ...]:
    """Every figure that is judged: the rate, and each latency that has a ceiling."""
    return tuple(dict.fromkeys((RATE, *(ceiling.series for ceiling in workload.guards.ceilings))))


def runs_at(comparison: Comparison, arm: Arm, point: str) -> list[Measurement]:
    """The experiment's own valid runs of one arm at one load point."""
    return [m for m in comparison.own if m.arm is arm and m.load_point == point and log_tok_s(m) is not None]


def parent_runs(comparison: Comparison, point: str) -> list[Measurement]:
    """All valid runs of the parent at a load point, in this epoch; those of the record don't enter a close-out."""
    record = [] if comparison.purpose is Purpose.CLOSE_OUT else [m for m in comparison.record if m.load_point == point]
    return record + runs_at(comparison, Arm.BASELINE, point)


def ordered_points(workload: Workload) -> list[LoadPoint]:
    """The objective's load points first: they decide soonest."""
    return sorted(workload.load_points, key=lambda p: (p.name not in workload.objective.at, p.concurrency))


def guard_points(workload: Workload) -> list[LoadPoint]:
    """The load points that are only guarded."""
    return [p for p in ordered_points(workload) if p.name not in workload.objective.at]
