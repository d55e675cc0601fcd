"""The first judge: is the candidate better, and if that is not known yet, which run would tell.

Pure functions from measurements to words: no I/O, no clock, no randomness. Everything is done on logarithms of
output tok/s, so that a gain and the loss that undoes it have the same size.

Method. At each load point the runs of one spec in one baseline epoch form a group; the spread within groups,
pooled over the session and shrunk towards a stated prior, is the noise of one run (launch effects included,
since a comparison has as many launches as runs at a point). The effect is the difference of the arms' means and
has a Student t interval. The session's false-keep budget is divided evenly (Bonferroni) among the experiments
that may be judged and the looks at each, which keeps it valid under peeking at the price of some power.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from agent.validity import COLLAPSED
from state.models import (
    Arm,
    Effect,
    Frozen,
    JudgeRule,
    LoadPoint,
    Measurement,
    MeasurementStatus,
    Outcome,
    Verdict,
    Workload,
)

REPORT_CONFIDENCE = 0.95


class Noise(Frozen):
    """Spread of one run's log tok/s at a load point, and what it rests on."""

    sd: float
    df: float


class Need(Frozen):
    """The next run that the judge wants: this arm, in its `block`-th launch, at this load point."""

    arm: Arm
    block: int
    load_point: str


class Comparison(Frozen):
    """All that the judge may look at.

    `own` are the experiment's measurements, `record` valid earlier runs of the parent in this epoch, newest
    launch last; `groups` the session's valid runs as (load point, group, log tok/s) for the noise. `share` is the
    number of experiments among which the false-keep budget is divided.
    """

    experiment_id: str
    workload: Workload
    rule: JudgeRule
    share: int
    own: tuple[Measurement, ...]
    record: tuple[Measurement, ...] = ()
    groups: tuple[tuple[str, str, float], ...] = ()
    start_failure: str | None = None
    failed_launches: tuple[str, ...] = ()
    observation: bool = False
    close_out: bool = False


class Assessment(Frozen):
    """Either the next run or the verdict, never both."""

    need: Need | None = None
    verdict: Verdict | None = None


def log_tok_s(measurement: Measurement) -> float | None:
    """Log of the run's output tok/s, None unless it is valid and positive."""
    metrics = measurement.metrics
    if measurement.status is not MeasurementStatus.VALID or metrics is None or not metrics.output_tok_s:
        return None
    return math.log(metrics.output_tok_s)


def noise_at(point: str, groups: Iterable[tuple[str, str, float]], rule: JudgeRule) -> Noise:
    """Pooled within-group spread at a load point, shrunk towards the prior (a scaled inverse chi-square)."""
    by_group: dict[str, list[float]] = defaultdict(list)
    for load_point, group, value in groups:
        if load_point == point:
            by_group[group].append(value)
    squares = sum(float(np.sum((np.array(v) - np.mean(v)) ** 2)) for v in by_group.values())
    df = sum(len(v) - 1 for v in by_group.values())
    total = rule.noise_prior_df + df
    variance = (rule.noise_prior_df * rule.noise_prior**2 + squares) / total
    return Noise(sd=max(rule.noise_floor, math.sqrt(variance)), df=total)


def assess(comparison: Comparison) -> Assessment:
    """The verdict if it is clear, else the run that is wanted next."""
    if comparison.start_failure is not None:
        return _verdict(comparison, Outcome.FAILED, comparison.start_failure)
    if comparison.observation:
        return _observe(comparison)
    collapse = _collapse(comparison)
    if collapse is not None:
        return _verdict(comparison, Outcome.COLLAPSED, collapse)
    early = _early_end(comparison)
    if early is not None:
        return early
    need = _next_need(comparison)
    if need is not None:
        return Assessment(need=need)
    return _verdict(
        comparison,
        Outcome.INCONCLUSIVE,
        f"after {_blocks(comparison, Arm.CANDIDATE)} launches the objective is still {_objective_text(comparison)}",
    )


class Pace(Frozen):
    """How a baseline run at a load point went: output tok/s, whole duration in s, and the E2E of its slow requests."""

    tok_s: float
    duration_s: float
    e2e_p99_s: float


def pace(comparison: Comparison, point: str) -> Pace | None:
    """The pace of the parent's newest valid run at a load point, None before there is one."""
    runs = [m for m in comparison.record if m.load_point == point] + _runs(comparison.own, Arm.BASELINE, point)
    metrics = runs[-1].metrics if runs else None
    if metrics is None or not metrics.output_tok_s:
        return None
    slow = metrics.e2e_ms.p99
    return Pace(
        tok_s=metrics.output_tok_s,
        duration_s=metrics.duration_s,
        e2e_p99_s=metrics.duration_s if slow is None else slow / 1000,
    )


def collapsing(elapsed_s: float, output_tokens: int, baseline: Pace, rule: JudgeRule) -> str | None:
    """Whether a run in progress is already so far below the baseline that finishing it would teach nothing.

    Looks only once every request that was sent first should long be answered (twice the E2E of the baseline's slow
    ones, or one and a half whole runs, whichever is sooner), and then asks for less than half of the collapse ratio,
    because more slots in parallel bring the first tokens late. A run that outlasts what the ratio allows has collapsed
    whatever it still does.
    """
    if elapsed_s > 1.5 * baseline.duration_s / rule.collapse_ratio:
        return f"still running after {elapsed_s:.0f} s where the baseline needs {baseline.duration_s:.0f} s"
    patience_s = max(2.0, min(1.5 * baseline.duration_s, 2 * baseline.e2e_p99_s))
    share = output_tokens / elapsed_s / baseline.tok_s if elapsed_s > 0 else 0.0
    if elapsed_s >= patience_s and share < 0.5 * rule.collapse_ratio:
        rate = output_tokens / elapsed_s
        return f"{rate:.1f} tok/s after {elapsed_s:.0f} s, {share:.0%} of the baseline's {baseline.tok_s:.1f}"
    return None


# --- the parts of an assessment ----------------------------------------------------------------------------


def _observe(comparison: Comparison) -> Assessment:
    for block in range(comparison.rule.baseline_runs):
        for point in _ordered_points(comparison.workload):
            if not _taken(comparison, Arm.BASELINE, block, point.name):
                return Assessment(need=Need(arm=Arm.BASELINE, block=block, load_point=point.name))
    return _verdict(comparison, Outcome.OBSERVED, _observation_text(comparison))


def _observation_text(comparison: Comparison) -> str:
    parts = []
    for point in _ordered_points(comparison.workload):
        values = [math.exp(v) for v in _values(comparison.own, Arm.BASELINE, point.name)]
        spread = noise_at(point.name, comparison.groups, comparison.rule).sd
        parts.append(f"{point.name} {np.mean(values):.1f} tok/s (noise {spread:.1%})")
    return ", ".join(parts)


def _collapse(comparison: Comparison) -> str | None:
    floor = math.log(comparison.rule.collapse_ratio)
    for taken in comparison.own:
        if taken.arm is not Arm.CANDIDATE:
            continue
        if taken.status is MeasurementStatus.INVALID and taken.reasons[:1] == (COLLAPSED,):
            return f"{taken.load_point}: {taken.reasons[1]}"
        value = log_tok_s(taken)
        reference = _baseline_values(comparison, taken.load_point)
        if value is not None and reference and value - float(np.mean(reference)) < floor:
            share = math.exp(value - float(np.mean(reference)))
            return f"{taken.load_point}: one run reached {share:.0%} of the baseline"
    return None


def _early_end(comparison: Comparison) -> Assessment | None:
    """Harm, futility or a keep, as soon as the data say so; None while they do not."""
    points = {p.name: e for p in comparison.workload.load_points if (e := effect_at(comparison, p.name))}
    if not comparison.close_out:
        harm = _harm(comparison, points)
        if harm is not None:
            return _verdict(comparison, Outcome.WORSE, harm)
        slo = _slo_broken(comparison)
        if slo is not None:
            return _verdict(comparison, Outcome.WORSE, slo)
    objective = objective_effect(comparison)
    if objective is None or not _block_complete(comparison):
        return None
    if objective.high < 0 and not comparison.close_out:
        return _verdict(comparison, Outcome.WORSE, f"objective {objective.percent}")
    if objective.high < math.log1p(comparison.rule.minimal_effect) and not comparison.close_out:
        reason = f"objective {objective.percent} cannot reach {comparison.rule.minimal_effect:.0%}"
        return _verdict(comparison, Outcome.NO_DIFFERENCE, reason)
    return _keep(comparison, objective, points)


def _keep(comparison: Comparison, objective: Effect, points: dict[str, Effect]) -> Assessment | None:
    """BETTER when the budgeted lower bound is above zero and enough interleaved launches were measured."""
    if not _enough_blocks(comparison):
        return None
    bound = _lower_bound(comparison)
    if bound is None or bound <= 0:
        return None
    tolerance = math.log1p(-comparison.workload.guards.other_points_tolerance)
    unguarded = [name for name, effect in points.items() if effect.low < tolerance]
    note = f"; unguarded within the tolerance: {', '.join(sorted(unguarded))}" if unguarded else ""
    reason = f"objective {objective.percent}, budgeted lower bound {100 * math.expm1(bound):+.1f} %{note}"
    return _verdict(comparison, Outcome.BETTER, reason)


def _harm(comparison: Comparison, points: dict[str, Effect]) -> str | None:
    """A guard vetoes when harm beyond its tolerance is likelier than not, given enough runs to mean it."""
    tolerance = math.log1p(-comparison.workload.guards.other_points_tolerance)
    for name, effect in points.items():
        if name in comparison.workload.objective.at and len(comparison.workload.objective.at) == 1:
            continue
        settled = effect.n_candidate >= comparison.rule.min_blocks
        bound = effect.estimate if settled else effect.high
        if bound < tolerance:
            return f"{name} loses: {effect.percent}, tolerance {math.expm1(tolerance):+.0%}"
    return None


def _slo_broken(comparison: Comparison) -> str | None:
    """A ceiling that the candidate's median run is above; one that the baseline broke already is no fresh harm."""
    guards = comparison.workload.guards
    for limit, field in ((guards.ttft_p90_ms, "ttft_ms"), (guards.tpot_p90_ms, "tpot_ms")):
        if limit is None:
            continue
        for point in comparison.workload.load_points:
            candidate = _p90_ms(_runs(comparison.own, Arm.CANDIDATE, point.name), field)
            baseline = _p90_ms(_baseline_runs(comparison, point.name), field)
            if candidate is not None and candidate > max(limit, baseline or 0.0):
                return f"{point.name}: {field[:4]} p90 {candidate:.0f} ms is above {limit:.0f} ms"
    return None


def _p90_ms(runs: Sequence[Measurement], field: str) -> float | None:
    values = [p90 for m in runs if m.metrics and (p90 := getattr(m.metrics, field).p90) is not None]
    return float(np.median(values)) if values else None


def effect_at(comparison: Comparison, point: str, confidence: float = REPORT_CONFIDENCE) -> Effect | None:
    """Effect at one load point with a two-sided interval; None until both arms have a valid run."""
    candidate = _values(comparison.own, Arm.CANDIDATE, point)
    baseline = _baseline_values(comparison, point)
    if not candidate or not baseline:
        return None
    noise = noise_at(point, comparison.groups, comparison.rule)
    estimate = float(np.mean(candidate) - np.mean(baseline))
    error = noise.sd * math.sqrt(1 / len(candidate) + 1 / len(baseline))
    margin = float(stats.t.ppf(0.5 + confidence / 2, noise.df)) * error
    return Effect(
        estimate=estimate,
        low=estimate - margin,
        high=estimate + margin,
        n_baseline=len(baseline),
        n_candidate=len(candidate),
        launches_baseline=len({m.trial_id for m in _baseline_runs(comparison, point)}),
        launches_candidate=len({m.trial_id for m in _runs(comparison.own, Arm.CANDIDATE, point)}),
    )


def objective_effect(comparison: Comparison, confidence: float = REPORT_CONFIDENCE) -> Effect | None:
    """Mean of the effects at the objective's load points; None until each has both arms."""
    effects = [effect_at(comparison, name, confidence) for name in comparison.workload.objective.at]
    found = [effect for effect in effects if effect is not None]
    if len(found) < len(effects):
        return None
    estimate = sum(e.estimate for e in found) / len(found)
    margin = math.sqrt(sum((e.high - e.estimate) ** 2 for e in found)) / len(found)
    return Effect(
        estimate=estimate,
        low=estimate - margin,
        high=estimate + margin,
        n_baseline=min(e.n_baseline for e in found),
        n_candidate=min(e.n_candidate for e in found),
        launches_baseline=min(e.launches_baseline for e in found),
        launches_candidate=min(e.launches_candidate for e in found),
    )


def false_keep_share(comparison: Comparison) -> float:
    """The part of the budget that one look at this experiment may spend (one-sided)."""
    rule = comparison.rule
    if comparison.close_out:
        return rule.false_keep_budget
    looks = rule.max_blocks - rule.min_blocks + 1
    return rule.false_keep_budget / max(1, comparison.share) / looks


def _lower_bound(comparison: Comparison) -> float | None:
    confidence = 1 - 2 * false_keep_share(comparison)
    effect = objective_effect(comparison, confidence)
    return None if effect is None else effect.low


def close(comparison: Comparison, outcome: Outcome, reason: str) -> Verdict:
    """A verdict that something other than the data asks for (no time left, runs void), with the data beside it."""
    points = {p.name: e for p in comparison.workload.load_points if (e := effect_at(comparison, p.name))}
    rule: dict[str, float | str] = dict(comparison.rule.model_dump())
    rule["alpha_per_look"] = false_keep_share(comparison)
    evidence = [m.id for m in comparison.own if m.status is not MeasurementStatus.OPEN]
    return Verdict(
        experiment_id=comparison.experiment_id,
        outcome=outcome,
        reason=reason,
        objective=objective_effect(comparison),
        points=points,
        evidence=(*comparison.failed_launches, *evidence),
        rule=rule,
    )


def _verdict(comparison: Comparison, outcome: Outcome, reason: str) -> Assessment:
    return Assessment(verdict=close(comparison, outcome, reason))


def _objective_text(comparison: Comparison) -> str:
    effect = objective_effect(comparison)
    return effect.percent if effect is not None else "unmeasured"


# --- which run is next -------------------------------------------------------------------------------------


def _next_need(comparison: Comparison) -> Need | None:
    """Candidate first where the parent has a record to be screened against, then turn about, block by block."""
    candidate_first = comparison.close_out or all(
        _baseline_values(comparison, p.name) for p in comparison.workload.load_points
    )
    arms = (Arm.CANDIDATE, Arm.BASELINE) if candidate_first else (Arm.BASELINE, Arm.CANDIDATE)
    blocks = comparison.rule.close_out_blocks if comparison.close_out else comparison.rule.max_blocks
    for block in range(blocks):
        # Turned about, the final comparison is balanced against drift and ends on the configuration to be left.
        turned = comparison.close_out and block % 2 == 1
        for arm in reversed(arms) if turned else arms:
            for point in _ordered_points(comparison.workload):
                if not _taken(comparison, arm, block, point.name):
                    return Need(arm=arm, block=block, load_point=point.name)
    return None


def _ordered_points(workload: Workload) -> list[LoadPoint]:
    """The objective's load points first: they decide soonest."""
    return sorted(workload.load_points, key=lambda p: (p.name not in workload.objective.at, p.concurrency))


def _taken(comparison: Comparison, arm: Arm, block: int, point: str) -> bool:
    return any(m.block == block for m in _runs(comparison.own, arm, point))


def _blocks(comparison: Comparison, arm: Arm) -> int:
    """How many blocks of an arm are complete at every load point."""
    counts = [len({m.block for m in _runs(comparison.own, arm, p.name)}) for p in comparison.workload.load_points]
    return min(counts)


def _block_complete(comparison: Comparison) -> bool:
    """No look in the middle of a block: each load point has as many candidate runs as every other."""
    counts = {len(_runs(comparison.own, Arm.CANDIDATE, p.name)) for p in comparison.workload.load_points}
    return len(counts) == 1 and counts != {0}


def _enough_blocks(comparison: Comparison) -> bool:
    if comparison.close_out:
        wanted = comparison.rule.close_out_blocks
        return _blocks(comparison, Arm.CANDIDATE) >= wanted and _blocks(comparison, Arm.BASELINE) >= wanted
    return _blocks(comparison, Arm.CANDIDATE) >= comparison.rule.min_blocks and _blocks(comparison, Arm.BASELINE) >= 1


def _runs(measurements: Sequence[Measurement], arm: Arm, point: str) -> list[Measurement]:
    return [m for m in measurements if m.arm is arm and m.load_point == point and log_tok_s(m) is not None]


def _values(measurements: Sequence[Measurement], arm: Arm, point: str) -> list[float]:
    return [value for m in _runs(measurements, arm, point) if (value := log_tok_s(m)) is not None]


def _baseline_runs(comparison: Comparison, point: str) -> list[Measurement]:
    """Own baseline runs and those of the parent's last recorded launch: recent enough not to have drifted."""
    recorded = [m for m in comparison.record if m.load_point == point and log_tok_s(m) is not None]
    if comparison.close_out or not recorded:
        return _runs(comparison.own, Arm.BASELINE, point)
    newest = [m for m in recorded if m.trial_id == recorded[-1].trial_id]
    return newest + _runs(comparison.own, Arm.BASELINE, point)


def _baseline_values(comparison: Comparison, point: str) -> list[float]:
    return [value for m in _baseline_runs(comparison, point) if (value := log_tok_s(m)) is not None]
