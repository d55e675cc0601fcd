"""The verdict if it is clear, else the run that is wanted next; pure functions of a comparison.

The course of an experiment is replayed from its stored runs each time: the same runs always give the same word, and a
resumed session stands where the interrupted one stood.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from agent.judge import course, effects, noise, spending
from agent.judge.boundary import Looks
from agent.judge.comparison import (
    Assessment,
    Comparison,
    Need,
    guard_points,
    log_tok_s,
    ordered_points,
    runs_at,
)
from agent.judge.course import Ruling, Stakes, Verdicts
from agent.judge.series import knows_parent, launch_of, night_belief, rounds
from state.models import Arm, MeasurementStatus, Outcome, Verdict

ENDS = {
    Ruling.KEEP: Outcome.BETTER,
    Ruling.HOPELESS: Outcome.NO_DIFFERENCE,
    Ruling.HARM: Outcome.WORSE,
    Ruling.UNDECIDED: Outcome.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Standing:
    """Where an experiment stands: the missing run or the ruling, and the last judgement that led there."""

    need: Need | None = None
    ruling: Ruling | None = None
    last: Verdicts | None = None


def assess(comparison: Comparison) -> Assessment:
    """The verdict if it is clear, else the run that is wanted next."""
    if comparison.start_failure is not None:
        return _verdict(comparison, Outcome.FAILED, comparison.start_failure)
    if comparison.observation:
        return _observe(comparison)
    collapse = effects.collapse(comparison)
    if collapse is not None:
        return _verdict(comparison, Outcome.COLLAPSED, collapse)
    if comparison.close_out:
        return _close_out(comparison)
    veto = effects.harm(comparison) or effects.broken_slo(comparison)
    if veto is not None:
        return _verdict(comparison, Outcome.WORSE, veto)
    standing = _standing(comparison)
    if standing.ruling is None:
        return Assessment(need=standing.need)
    return _verdict(comparison, ENDS[standing.ruling], _reason(comparison, standing))


def close(comparison: Comparison, outcome: Outcome, reason: str) -> Verdict:
    """A verdict that something other than the data asks for (no time left, runs void), with the data beside it."""
    rule: dict[str, float | str] = dict(comparison.rule.model_dump())
    rule["share"] = false_keep_share(comparison)
    rule["given_back"] = _given_back(comparison, outcome)
    evidence = [m.id for m in comparison.own if m.status is not MeasurementStatus.OPEN]
    return Verdict(
        experiment_id=comparison.experiment_id,
        outcome=outcome,
        reason=reason,
        objective=effects.objective_effect(comparison),
        points=effects.all_effects(comparison),
        evidence=(*comparison.failed_launches, *evidence),
        rule=rule,
    )


def false_keep_share(comparison: Comparison) -> float:
    """The part of the night's error that this experiment may spend; the close-out has its own, an observation none."""
    if comparison.observation:
        return 0.0
    budget = comparison.rule.false_keep_budget
    return budget if comparison.close_out else spending.share_of(budget, comparison.earlier, comparison.left)


def stakes(comparison: Comparison) -> Stakes:
    """What this experiment may spend."""
    prices, rule = comparison.prices, comparison.rule
    candidate, parent = runs_per_launch(comparison)
    pair_s = 2 * prices.launch_s + (candidate + parent) * prices.run_s
    return Stakes(
        share=np.array([false_keep_share(comparison)]),
        looks=Looks(rule.min_blocks, rule.max_blocks),
        minimal_effect=rule.minimal_effect,
        hopeless=spending.hopeless_below(np.array([prices.left_s]), comparison.left, pair_s),
    )


def runs_per_launch(comparison: Comparison) -> tuple[int, int]:
    """Runs of a launch at the objective's load points: the candidate's, the parent's."""
    prices = comparison.prices
    return spending.runs_per_launch(prices.launch_s, prices.run_s, comparison.rule.max_runs)


# --- the parts of an assessment ----------------------------------------------------------------------------


def _standing(comparison: Comparison) -> Standing:
    """Replay the experiment up to the first run that is missing or to its end."""
    belief = night_belief(comparison, comparison.workload.objective.at)
    candidate, parent = runs_per_launch(comparison)
    served_first = parent if comparison.fresh else 0
    parent_first = served_first if knows_parent(belief) else comparison.rule.baseline_runs
    state, last, ruling = course.begin(belief), None, Ruling.BASELINE if parent_first else Ruling.CANDIDATE
    blocks = {Arm.BASELINE: 0, Arm.CANDIDATE: 0}
    allowed = stakes(comparison)
    while ruling in (Ruling.BASELINE, Ruling.CANDIDATE):
        arm = Arm.CANDIDATE if ruling is Ruling.CANDIDATE else Arm.BASELINE
        block = blocks[arm]
        blocks[arm] += 1
        runs = candidate if arm is Arm.CANDIDATE else parent
        if arm is Arm.BASELINE and block == 0 and parent_first:
            runs = parent_first
        missing = _missing(comparison, arm, block, comparison.workload.objective.at, runs)
        if missing is not None:
            return Standing(need=missing, last=last)
        state = course.after(state, launch_of(arm, _objective_runs(comparison, arm, block)[:runs]))
        ruling = Ruling.CANDIDATE
        if blocks[Arm.CANDIDATE]:
            state, last = course.rule(state, allowed)
            ruling = Ruling(int(last.ruling[0]))
        if ruling in (Ruling.HOPELESS, Ruling.HARM):
            break
        missing = _missing(comparison, arm, block, [p.name for p in guard_points(comparison.workload)], 1)
        if missing is not None:
            return Standing(need=missing, last=last)
    return Standing(ruling=ruling, last=last)


def _missing(comparison: Comparison, arm: Arm, block: int, points: Collection[str], runs: int) -> Need | None:
    """The first run that a launch lacks, point by point in each round."""
    names = [p.name for p in ordered_points(comparison.workload) if p.name in points]
    taken = {name: sum(1 for m in runs_at(comparison, arm, name) if m.block == block) for name in names}
    for run in range(runs):
        for name in names:
            if taken[name] <= run:
                return Need(arm=arm, block=block, load_point=name, run=run)
    return None


def _objective_runs(comparison: Comparison, arm: Arm, block: int) -> list[float]:
    points = comparison.workload.objective.at
    values = {
        name: [v for m in runs_at(comparison, arm, name) if m.block == block and (v := log_tok_s(m)) is not None]
        for name in points
    }
    return rounds(values, points)


def _observe(comparison: Comparison) -> Assessment:
    names = [p.name for p in ordered_points(comparison.workload)]
    missing = _missing(comparison, Arm.BASELINE, 0, names, comparison.rule.baseline_runs)
    if missing is not None:
        return Assessment(need=missing)
    parts = []
    for name in names:
        values = [m.metrics.output_tok_s or 0.0 for m in runs_at(comparison, Arm.BASELINE, name) if m.metrics]
        parts.append(f"{name} {np.mean(values):.1f} tok/s (noise {effects.run_noise(comparison, name):.1%})")
    return _verdict(comparison, Outcome.OBSERVED, ", ".join(parts))


def _close_out(comparison: Comparison) -> Assessment:
    """All launches in turned order (ABBA, ending on what is to be left), then one look."""
    names = [p.name for p in ordered_points(comparison.workload)]
    objective = comparison.workload.objective.at
    runs, _ = runs_per_launch(comparison)
    for block in range(comparison.rule.close_out_blocks):
        arms = (Arm.CANDIDATE, Arm.BASELINE)
        for arm in reversed(arms) if block % 2 else arms:
            missing = _missing(comparison, arm, block, objective, runs) or _missing(comparison, arm, block, names, 1)
            if missing is not None:
                return Assessment(need=missing)
    belief = effects.believed(comparison, objective)
    effect = effects.objective_effect(comparison)
    assert belief is not None and effect is not None, "both sides were measured"
    chance = float(noise.chance_below(belief, 0.0, noise.weights(belief))[0])
    outcome = Outcome.BETTER if chance < comparison.rule.false_keep_budget else Outcome.INCONCLUSIVE
    return _verdict(comparison, outcome, f"objective {effect.percent}, chance of no gain {chance:.2g}")


def _reason(comparison: Comparison, standing: Standing) -> str:
    effect = effects.objective_effect(comparison)
    assert effect is not None and standing.last is not None, "a ruling rests on both sides"
    chance = float(standing.last.no_gain[0])
    said = f"objective {effect.percent}"
    if standing.ruling is Ruling.KEEP:
        loose = effects.unguarded(comparison)
        note = f"; unguarded within the tolerance: {', '.join(loose)}" if loose else ""
        return f"{said}, chance of no gain {chance:.2g}, confirmed on a later launch of the parent{note}"
    if standing.ruling is Ruling.HARM:
        return f"{said}, chance of a gain {1 - chance:.2g}"
    if standing.ruling is Ruling.HOPELESS:
        least = comparison.rule.minimal_effect
        return f"{said}: a gain of {least:.0%} is too unlikely to be worth more launches"
    return f"after {effect.launches_candidate} launches the objective is still {said.removeprefix('objective ')}"


def _given_back(comparison: Comparison, outcome: Outcome) -> float:
    share = false_keep_share(comparison)
    if comparison.close_out or comparison.observation or outcome is Outcome.COLLAPSED:
        return 0.0
    if outcome is Outcome.BETTER:
        return share
    last = _standing(comparison).last
    return share if last is None else float(last.given_back[0])


def _verdict(comparison: Comparison, outcome: Outcome, reason: str) -> Assessment:
    return Assessment(verdict=close(comparison, outcome, reason))
