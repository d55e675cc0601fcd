"""The verdict if it is clear, else the run that is wanted next; pure functions of a comparison.

The course of an experiment is replayed from its stored runs each time: the same runs always give the same word, and a
resumed session stands where the interrupted one stood.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from agent.judge import boundary, course, effects, guards, noise, spending
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
from state.models import Arm, MeasurementStatus, Outcome, Purpose, Verdict

REVISION = 4
"""Stands in each verdict; it goes up with every change that lets the same runs come to another verdict."""

NO_GAIN_LEFT = 0.1
"""A dismissed candidate makes no relevant difference when its chance of the minimal effect is at most this. Above, it
was given up because finding out would cost more than it is likely to bring, and the word is inconclusive."""


PARENT_PASSES = 3
"""Passes over the fixed prompts from which the parent's own spread is known."""


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
    if comparison.complaint is not None:
        return _verdict(comparison, Outcome.WORSE, comparison.complaint)
    if comparison.observes:
        return _observe(comparison)
    collapse = effects.collapse(comparison)
    if collapse is not None:
        return _verdict(comparison, Outcome.COLLAPSED, collapse)
    if comparison.purpose is Purpose.CLOSE_OUT:
        return _close_out(comparison)
    veto = None if comparison.purpose is Purpose.SENTINEL else guards.veto(comparison)
    if veto is not None:
        return _verdict(comparison, Outcome.WORSE, veto)
    if comparison.purpose is Purpose.WITHOUT:
        return _without(comparison)
    standing = _standing(comparison)
    if standing.ruling is None:
        return Assessment(need=standing.need)
    return _verdict(comparison, *_word(comparison, standing))


def asks_answers(comparison: Comparison, need: Need) -> bool:
    """Whether the fixed prompts should be asked after the wanted run.

    They cost a few seconds, so only where they matter: the parent's own spread takes a few passes, and a candidate is
    asked from its second launch on, since most never get there and no keep comes before.
    """
    if not guards.guards_answers(comparison) or comparison.purpose in (Purpose.SENTINEL, Purpose.WITHOUT):
        return False
    first = ordered_points(comparison.workload)[0].name
    if need.load_point != first or (need.run > 0 and not comparison.observes):
        return False
    if need.arm is Arm.CANDIDATE:
        return need.block >= 1 or comparison.purpose is Purpose.CLOSE_OUT
    return len(comparison.parent_answers) < PARENT_PASSES


def close(comparison: Comparison, outcome: Outcome, reason: str) -> Verdict:
    """A verdict that something other than the data asks for (no time left, runs void), with the data beside it."""
    rule: dict[str, float | str] = dict(comparison.rule.model_dump())
    rule["judge"] = REVISION
    rule["share"] = false_keep_share(comparison)
    rule["given_back"] = _given_back(comparison, outcome)
    chance = no_gain(comparison)
    if chance is not None:
        rule["no_gain"] = chance
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
    """The part of the night's error that this experiment may spend.

    The close-out has its own, an observation none. A sentinel is held to what the next experiment may spend, but since
    it keeps nothing it uses nothing up. Leaving a kept change out again adds none to the server, so it has no share.
    """
    if comparison.observes or comparison.purpose is Purpose.WITHOUT:
        return 0.0
    budget = comparison.rule.false_keep_budget
    if comparison.purpose is Purpose.CLOSE_OUT:
        return budget
    return spending.share_of(budget, comparison.earlier, comparison.left + comparison.foreseen)


def no_gain(comparison: Comparison) -> float | None:
    """The chance that the candidate is no gain at the objective; None until both sides were measured."""
    belief = effects.believed(comparison, comparison.workload.objective.at)
    return None if belief is None else float(noise.chance_below(belief, 0.0, noise.weights(belief))[0])


def stakes(comparison: Comparison) -> Stakes:
    """What this experiment may spend."""
    prices, rule = comparison.prices, comparison.rule
    candidate, parent = runs_per_launch(comparison)
    pair_s = 2 * prices.launch_s + (candidate + parent) * prices.run_s
    most = rule.max_blocks
    if comparison.repeats:
        most = spending.more_launches(most, prices.left_s / comparison.left, pair_s)
    return Stakes(
        share=np.array([false_keep_share(comparison)]),
        looks=Looks(rule.min_blocks, most),
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
        elif last is not None and last.clear[0]:
            runs = 1
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
    """All launches in turned order (ABBA, ending on what is to be left), then a look; more of them while time is left.

    What was kept was proven once, so unless it now looks like harm, the launches that the time pays for are made until
    it is shown again. The looks share the error that a single one would have.
    """
    looks = _close_out_looks(comparison)
    missing = next((need for pair in range(looks.last) if (need := _close_out_run(comparison, pair))), None)
    if missing is not None and not _looks_before(comparison, looks, missing.block):
        return Assessment(need=missing)
    broken = guards.broken_answers(comparison)
    if broken is not None:
        return _verdict(comparison, Outcome.WORSE, broken)
    chance, effect = no_gain(comparison), effects.objective_effect(comparison)
    assert chance is not None and effect is not None, "both sides were measured"
    shown = chance < float(boundary.look_level(np.array([comparison.rule.false_keep_budget]), looks)[0])
    if missing is not None and not shown and 1 - chance >= course.HARM_LEVEL:
        return Assessment(need=missing)
    outcome = Outcome.BETTER if shown else Outcome.INCONCLUSIVE
    return _verdict(comparison, outcome, f"objective {effect.percent}, chance of no gain {chance:.2g}")


def _looks_before(comparison: Comparison, looks: Looks, pair: int) -> bool:
    """Whether there is a look before this pair of launches begins."""
    begun = any(taken.block == pair for taken in comparison.own)
    return pair >= looks.first and not begun and (pair - looks.first) % 2 == 0


def _close_out_looks(comparison: Comparison) -> Looks:
    """From how many pairs of launches on the final comparison is looked at, and how many it may take.

    Two more at a time: one begins with either side, so that a drift favours none.
    """
    rule, prices = comparison.rule, comparison.prices
    runs, _ = runs_per_launch(comparison)
    pairs = spending.more_launches(0, prices.left_s, 2 * (prices.launch_s + runs * prices.run_s))
    more = min(pairs, max(0, rule.max_blocks - rule.close_out_blocks))
    return Looks(rule.close_out_blocks, rule.close_out_blocks + more - more % 2)


def _close_out_run(comparison: Comparison, pair: int) -> Need | None:
    """The first run that a pair of launches lacks."""
    names = [p.name for p in ordered_points(comparison.workload)]
    objective = comparison.workload.objective.at
    runs, _ = runs_per_launch(comparison)
    arms = (Arm.CANDIDATE, Arm.BASELINE)
    for arm in reversed(arms) if pair % 2 else arms:
        missing = _missing(comparison, arm, pair, objective, runs) or _missing(comparison, arm, pair, names, 1)
        if missing is not None:
            return missing
    return None


def _without(comparison: Comparison) -> Assessment:
    """What the final configuration loses when one kept change is left out: fixed launches, or fewer when it is plain.

    A kept change was proven once, so it goes only if leaving it out does not even look like a loss.
    """
    names = [p.name for p in ordered_points(comparison.workload)]
    objective = comparison.workload.objective.at
    candidate, parent = runs_per_launch(comparison)
    for block in range(comparison.rule.close_out_blocks):
        for arm, runs in ((Arm.CANDIDATE, candidate), (Arm.BASELINE, parent)):
            missing = _missing(comparison, arm, block, objective, runs) or _missing(comparison, arm, block, names, 1)
            if missing is not None:
                return Assessment(need=missing)
        chance = no_gain(comparison)
        if chance is not None and 1 - chance < course.HARM_LEVEL:
            break
    chance, effect = no_gain(comparison), effects.objective_effect(comparison)
    assert chance is not None and effect is not None, "both sides were measured"
    said = f"without it {effect.percent}, chance that it is missed {chance:.2g}"
    if 1 - chance < course.HARM_LEVEL:
        return _verdict(comparison, Outcome.WORSE, said)
    if effect.estimate < 0:
        return _verdict(comparison, Outcome.INCONCLUSIVE, said)
    better = chance < comparison.rule.false_keep_budget
    return _verdict(comparison, Outcome.BETTER if better else Outcome.NO_DIFFERENCE, said)


def _word(comparison: Comparison, standing: Standing) -> tuple[Outcome, str]:
    """The outcome that a ruling comes to, and why."""
    effect = effects.objective_effect(comparison)
    assert effect is not None and standing.last is not None, "a ruling rests on both sides"
    chance = float(standing.last.no_gain[0])
    said = f"objective {effect.percent}"
    if standing.ruling is Ruling.KEEP:
        return _kept(comparison, f"{said}, chance of no gain {chance:.2g}, confirmed on a later launch of the parent")
    if standing.ruling is Ruling.HARM:
        return Outcome.WORSE, f"{said}, chance of a gain {1 - chance:.2g}"
    if standing.ruling is Ruling.HOPELESS:
        worth, least = float(standing.last.worth[0]), comparison.rule.minimal_effect
        outcome = Outcome.NO_DIFFERENCE if worth <= NO_GAIN_LEFT else Outcome.INCONCLUSIVE
        return outcome, f"{said}: the chance of a gain of {least:.0%} is {worth:.2g}, not worth more launches"
    still = f"after {effect.launches_candidate} launches the objective is still {effect.percent}"
    return Outcome.INCONCLUSIVE, still


def _kept(comparison: Comparison, said: str) -> tuple[Outcome, str]:
    """A gain at the objective is kept unless a guard that must be proven is not."""
    if comparison.purpose is Purpose.SENTINEL:
        return Outcome.BETTER, said
    allowed = comparison.workload.guards
    unproven, loose = guards.unproven_ceilings(comparison), guards.unguarded(comparison)
    changed, told = guards.unproven_answers(comparison), guards.answers(comparison)
    if changed is not None:
        return Outcome.INCONCLUSIVE, f"{said}, but {changed}"
    if unproven and not allowed.keep_unproven_slo:
        return Outcome.INCONCLUSIVE, f"{said}, but an SLO is not shown to hold: {'; '.join(unproven)}"
    if loose and not allowed.keep_unguarded:
        return Outcome.INCONCLUSIVE, f"{said}, but a loss beyond the tolerance can't be excluded at {', '.join(loose)}"
    notes = [f"unguarded within the tolerance: {', '.join(loose)}"] if loose else []
    notes += [f"SLO not shown to hold: {'; '.join(unproven)}"] if unproven else []
    notes += [f"answers: {told.word} ({told.reason})"] if told is not None else []
    return Outcome.BETTER, "; ".join((said, *notes))


def _given_back(comparison: Comparison, outcome: Outcome) -> float:
    share = false_keep_share(comparison)
    if comparison.purpose is not Purpose.TRY or comparison.observes or outcome is Outcome.COLLAPSED:
        return 0.0
    if outcome is Outcome.BETTER:
        return share
    last = _standing(comparison).last
    return share if last is None else float(last.given_back[0])


def _verdict(comparison: Comparison, outcome: Outcome, reason: str) -> Assessment:
    return Assessment(verdict=close(comparison, outcome, reason))
