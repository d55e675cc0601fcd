"""The judge on data made for it: every verdict, which run it wants, what it never counts, and how often it errs."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from agent.judge import (
    Pace,
    assess,
    boundary,
    close,
    collapsing,
    course,
    effect_at,
    false_keep_share,
    noise,
    objective_effect,
    pace,
    run_noise,
    spending,
)
from agent.judge.assess import runs_per_launch, stakes
from agent.judge.comparison import Prices
from agent.judge.rehearsal import Rehearsal, Script
from agent.validity import COLLAPSED
from state.models import (
    Arm,
    Ceiling,
    Guards,
    JudgeRule,
    Measurement,
    MeasurementStatus,
    Objective,
    Outcome,
    Purpose,
    Summary,
    Verdict,
)
from tests.agent.judging import (
    QUIET,
    RULE,
    WORKLOAD,
    Night,
    Server,
    baseline,
    candidate,
    compare,
    metrics,
    need_of,
    played,
    record,
    seen,
    taken,
    verdict_of,
    wanted,
    wish,
    with_latency,
)
from tools.simulated_answers import simulated_answers

EVEN = {"C high": 100.0, "C low": 50.0, "B high": 100.0, "B low": 50.0}
PARENT, CANDIDATE = np.array([False]), np.array([True])


def believing(*launches: tuple[bool, float, int, float]) -> noise.Belief:
    """After launches of (candidate's?, mean, runs, squared deviations)."""
    belief = noise.nothing_seen(1, RULE.noise_prior, RULE.noise_prior_df)
    for is_candidate, mean, runs, squares in launches:
        numbers = (np.array([float(value)]) for value in (mean, runs, squares))
        belief = noise.after_launch(belief, np.array([is_candidate]), *numbers)
    return belief


def spreads(belief: noise.Belief) -> tuple[float, float]:
    """Spread of a run and of a launch."""
    weight = noise.weights(belief)
    variances = noise.run_variance(belief, weight), noise.launch_variance(belief, weight)
    run, launch = (math.sqrt(float(variance[0])) for variance in variances)
    return run, launch


def estimate(belief: noise.Belief) -> float:
    return float((noise.weights(belief) * belief.fields[noise.EFFECT]).sum())


def twice(arm: Arm, number: int, high: float) -> tuple[Measurement, ...]:
    """A launch with all its runs at the objective's load point, and one at the other."""
    runs = 2 if arm is Arm.CANDIDATE else 4
    many = [taken(arm, number, "high", high, id=f"{arm}{number}{n}", run=n) for n in range(runs)]
    return (*many, taken(arm, number, "low", 50.0))


# --- noise ---


def test_before_anything_is_seen_the_noise_is_the_prior() -> None:
    assert run_noise(compare(), "high") == pytest.approx(RULE.noise_prior)


@pytest.mark.parametrize("spread", [0.002, 0.01, 0.08])
def test_the_spread_of_runs_is_learned_whatever_it_is(spread: float) -> None:
    values = 100 * np.exp(spread * np.random.default_rng(1).standard_normal(200))
    runs = [taken(Arm.BASELINE, 0, "high", float(v), id=f"m{n}", run=n) for n, v in enumerate(values)]
    assert run_noise(compare(*runs), "high") == pytest.approx(spread, rel=0.2)
    assert run_noise(compare(*runs), "low") == pytest.approx(RULE.noise_prior)


def test_what_a_change_does_is_no_noise() -> None:
    near = spreads(believing((False, 1.0, 4, 3e-4), (True, 1.0, 2, 1e-4), (False, 1.0, 4, 3e-4)))
    far = spreads(believing((False, 1.0, 4, 3e-4), (True, 9.0, 2, 1e-4), (False, 1.0, 4, 3e-4)))
    assert near == pytest.approx(far, rel=1e-4)


def test_launch_noise_is_told_from_run_noise() -> None:
    rng = np.random.default_rng(1)
    calm = [(False, float(m), 4, 3 * 0.02**2) for m in 0.01 * rng.standard_normal(20)]
    moody = [(False, float(m), 4, 3 * 0.002**2) for m in 0.06 * rng.standard_normal(20)]
    run, launch = spreads(believing(*calm))
    assert run == pytest.approx(0.02, rel=0.3) and launch < run
    run, launch = spreads(believing(*moody))
    assert run < 0.01 and launch > 5 * run


def test_one_new_launch_far_off_is_enough_to_believe_in_launch_noise() -> None:
    quiet = [(False, 0.0, 6, 5 * 0.002**2), (True, 0.0, 2, 0.002**2)]
    small = noise.models().launch <= 1.0
    before, after = believing(*quiet), believing(*quiet, (False, 0.06, 4, 3 * 0.002**2))
    assert noise.weights(before)[0, small].sum() > 0.5
    assert noise.weights(after)[0, small].sum() < 0.01


def test_a_candidate_on_the_line_of_a_drifting_parent_has_no_effect() -> None:
    launches = [(n % 2 == 1, 0.01 * n, 4, 3 * 0.01**2) for n in range(15)]
    assert abs(estimate(believing(*launches))) < 0.003


def test_a_wild_launch_of_the_parent_moves_its_level_little_and_widens_everything() -> None:
    steady = [(False, 0.01 * (-1) ** n, 4, 3 * 0.01**2) for n in range(20)]
    plain, wild = believing(*steady), believing(*steady, (False, -0.5, 4, 3 * 0.01**2))
    level = [float((noise.weights(b) * b.fields[noise.LEVEL]).sum()) for b in (plain, wild)]
    assert abs(level[1] - level[0]) < 0.1 * 0.5
    assert spreads(wild)[1] > spreads(plain)[1]


def test_a_new_parent_has_no_level_and_the_noise_stays() -> None:
    before = believing(*[(False, 0.03 * (-1) ** n, 4, 3e-4) for n in range(10)])
    after = noise.new_parent(before)
    assert after.fields[noise.LEVEL_LEVEL].min() == noise.UNKNOWN
    assert spreads(after) == spreads(before)


# --- boundaries and budget ---


@pytest.mark.parametrize("looks", [boundary.Looks(*ends) for ends in ((2, 2), (2, 3), (2, 5), (3, 9))])
@pytest.mark.parametrize("share", [1e-7, 0.0004, 0.01, 0.05])
def test_all_looks_together_spend_the_share_and_one_look_all_of_it(looks: boundary.Looks, share: float) -> None:
    level = float(boundary.look_level(np.array([share]), looks)[0])
    assert share / (looks.last - looks.first + 1) <= level * 1.01 <= share * 1.02
    if share > 1e-6:
        assert boundary.chance_to_cross(-float(stats.norm.ppf(level)), looks) == pytest.approx(share, rel=0.02)


def test_the_looks_of_a_walk_cross_as_often_as_was_computed() -> None:
    share, looks = 0.05, boundary.Looks(2, 5)
    z = -stats.norm.ppf(boundary.look_level(np.array([share]), looks)[0])
    information = np.array([2, 3, 4, 5]) / 5
    steps = np.random.default_rng(1).standard_normal((200_000, 4)) * np.sqrt(np.diff(information, prepend=0))
    crossed = int((steps.cumsum(axis=1) / np.sqrt(information) > z).any(axis=1).sum())
    assert 0.001 < stats.binom.cdf(crossed, 200_000, share) < 0.999


def test_what_is_given_back_is_the_less_the_better_it_looked_when_dismissed_and_never_more_than_the_share() -> None:
    chance, share = np.array([0.9, 0.5, 0.1, 0.01]), np.full(4, 0.01)
    looks = boundary.Looks(2, 5)
    level = boundary.look_level(share, looks)
    back = boundary.still_to_err(chance, np.full(4, 2.0), level, share, looks)
    assert list(back) == sorted(back) and back[-1] <= 0.01 and back[0] >= 0
    assert boundary.still_to_err(chance, np.full(4, 5.0), level, share, looks).max() == 0.0


@pytest.mark.parametrize(
    ("earlier", "left", "share"),
    [
        ((), 1, 0.05),
        ((), 10, 0.005),
        (((0.005, 0.0),), 9, 0.005),
        (((0.005, 0.005),), 9, 0.05 / 9),
        (((0.05, 0.0),), 3, 0.0),
    ],
)
def test_an_experiment_gets_an_even_part_of_what_is_left(
    earlier: tuple[tuple[float, float], ...], left: int, share: float
) -> None:
    assert false_keep_share(compare(left=left, earlier=earlier)) == pytest.approx(share)


def test_the_dearer_a_launch_the_more_runs_it_gets() -> None:
    plans = [spending.runs_per_launch(launch_s, 20.0, 4) for launch_s in (0.5, 30.0, 100.0, 400.0)]
    assert plans == sorted(plans) and plans[0] < plans[-1]
    assert all(parent >= own for own, parent in plans)
    assert spending.runs_per_launch(400.0, 20.0, 1) == (1, 1)


def test_the_scarcer_the_time_the_sooner_a_candidate_is_hopeless() -> None:
    levels = spending.hopeless_below(np.array([np.inf, 40_000.0, 20_000.0, 0.0]), 20, 600.0)
    assert list(levels) == sorted(levels)
    assert (levels[0], levels[-1]) == (spending.PATIENT, spending.HASTY)


# --- effects ---


def test_an_effect_is_a_log_ratio_with_an_interval_around_it() -> None:
    effect = effect_at(compare(*candidate(0, high=110.0), before=record()), "high")
    assert effect is not None
    assert effect.estimate == pytest.approx(math.log(1.1), abs=1e-3)
    assert effect.low < effect.estimate < effect.high
    assert (effect.n_candidate, effect.n_baseline, effect.launches_baseline) == (1, 4, 1)
    narrow = effect_at(compare(*candidate(0, high=110.0), before=record()), "high", confidence=0.5)
    assert narrow is not None and effect.low < narrow.low < narrow.high < effect.high


def test_more_launches_make_the_interval_narrower() -> None:
    few = objective_effect(compare(*candidate(0), before=record()))
    many = objective_effect(compare(*candidate(0), *baseline(0), *candidate(1), *baseline(1), before=record()))
    assert few is not None and many is not None
    assert many.high - many.low < few.high - few.low


def test_the_objective_is_the_mean_over_its_load_points() -> None:
    both = WORKLOAD.model_copy(update={"objective": Objective(at=("low", "high"))})
    effect = objective_effect(compare(*baseline(0), *candidate(0, high=121.0, low=50.0), workload=both))
    assert effect is not None
    assert effect.estimate == pytest.approx(math.log(1.21) / 2, abs=1e-3)


def test_there_is_no_effect_before_both_arms_were_measured() -> None:
    assert effect_at(compare(*candidate(0)), "high") is None
    assert objective_effect(compare(*baseline(0))) is None


def test_an_old_parent_says_nothing_about_the_level_of_the_new_one() -> None:
    old = seen(*record(high=10.0, low=5.0))
    assert objective_effect(compare(*candidate(0), night=old, epoch=1)) is None
    effect = objective_effect(compare(*baseline(0), *candidate(0, high=110.0), night=old, epoch=1))
    assert effect is not None
    assert effect.estimate == pytest.approx(math.log(1.1), abs=1e-3)


# --- which run is next ---


def test_with_a_record_the_candidate_is_screened_first_and_a_promising_one_alternates_with_the_parent() -> None:
    wishes, said = played(EVEN | {"C high": 104.0}, before=record())
    assert wishes[:9] == [
        *("C0 high", "C0 high", "C0 low"),
        *("B0 high", "B0 high", "B0 high", "B0 high", "B0 low"),
        "C1 high",
    ]
    assert said.verdict is not None and said.verdict.outcome is Outcome.BETTER


def test_a_hopeless_candidate_is_not_measured_where_it_was_not_meant_to_help() -> None:
    wishes, said = played(EVEN, before=record(), rule=QUIET)
    assert wishes == ["C0 high", "C0 high"]
    assert said.verdict is not None and said.verdict.outcome is Outcome.NO_DIFFERENCE


def test_without_a_record_the_parent_comes_first() -> None:
    wishes, _ = played(EVEN)
    first = ["B0 high"] * RULE.baseline_runs + ["B0 low", "C0 high", "C0 high"]
    assert wishes[: len(first)] == first


def test_a_launch_of_the_parent_that_serves_unmeasured_is_measured_before_it_is_replaced() -> None:
    wishes, _ = played(EVEN, before=record(), fresh=True)
    assert wishes[:6] == ["B0 high"] * 4 + ["B0 low", "C0 high"]


def test_the_objectives_load_points_come_first_then_those_with_less_load() -> None:
    at_low = WORKLOAD.model_copy(update={"objective": Objective(at=("low",))})
    wishes, _ = played(EVEN | {"C low": 60.0}, before=record(), workload=at_low)
    assert wishes[:4] == ["C0 low", "C0 low", "C0 high", "B0 low"]


def test_the_close_out_is_balanced_against_drift_and_ignores_the_record() -> None:
    slower = record(high=10.0, low=5.0)
    wishes, said = played(EVEN, before=slower, purpose=Purpose.CLOSE_OUT, prices=Prices(left_s=0.0))
    launches = list(dict.fromkeys(wish.split()[0] for wish in wishes))
    assert launches == ["C0", "B0", "B1", "C1"]
    assert wishes[:3] == ["C0 high", "C0 high", "C0 low"]
    assert said.verdict is not None and said.verdict.outcome is Outcome.INCONCLUSIVE


def test_the_close_out_goes_on_in_balance_while_time_is_left_and_nothing_is_shown() -> None:
    wishes, said = played(EVEN, purpose=Purpose.CLOSE_OUT)
    launches = list(dict.fromkeys(wish.split()[0] for wish in wishes))
    assert launches == ["C0", "B0", "B1", "C1", "C2", "B2", "B3", "C3"]
    assert said.verdict is not None and said.verdict.outcome is Outcome.INCONCLUSIVE


def test_the_close_out_ends_at_its_first_look_when_the_gain_is_plain_or_has_turned_to_harm() -> None:
    for high, outcome in ((150.0, Outcome.BETTER), (70.0, Outcome.INCONCLUSIVE)):
        wishes, said = played(EVEN | {"C high": high}, purpose=Purpose.CLOSE_OUT)
        assert list(dict.fromkeys(wish.split()[0] for wish in wishes)) == ["C0", "B0", "B1", "C1"]
        assert said.verdict is not None and said.verdict.outcome is outcome


def test_what_is_plain_after_a_launch_takes_one_run_of_each_launch_that_is_still_due() -> None:
    dear = Prices(launch_s=60.0, run_s=10.0)
    plain, said = played(EVEN | {"C high": 400.0}, before=record(), prices=dear)
    unclear, _ = played(EVEN | {"C high": 104.0}, before=record(), prices=dear)
    assert said.verdict is not None and said.verdict.outcome is Outcome.BETTER
    assert plain.count("C0 high") == unclear.count("C0 high") > 1
    assert [plain.count(f"{launch} high") for launch in ("B0", "C1", "B1")] == [1, 1, 1]
    assert unclear.count("B0 high") > 1


def test_what_may_still_come_on_the_list_keeps_its_part_of_the_error() -> None:
    alone = false_keep_share(compare(before=record()))
    foreseen = false_keep_share(compare(before=record()).model_copy(update={"foreseen": 4}))
    assert foreseen == pytest.approx(alone / 5)


def test_a_repeat_may_be_launched_as_often_as_the_time_left_pays() -> None:
    first = compare(before=record(), prices=Prices(launch_s=10.0, run_s=10.0, left_s=700.0))
    again = first.model_copy(update={"repeats": True})
    assert stakes(first).looks.last == RULE.max_blocks
    pair_s = 2 * 10.0 + sum(runs_per_launch(first)) * 10.0
    assert RULE.max_blocks < int(700.0 / pair_s) < spending.MOST_LAUNCHES
    assert stakes(again).looks.last == int(700.0 / pair_s)
    assert stakes(again.model_copy(update={"prices": Prices()})).looks.last == spending.MOST_LAUNCHES


def test_an_observation_measures_what_runs_and_nothing_else() -> None:
    wishes, said = played(EVEN, observes=True)
    assert wishes == ["B0 high", "B0 low"] * RULE.baseline_runs
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.OBSERVED
    assert "high 100.0 tok/s" in said.verdict.reason


# --- verdicts ---


def test_a_gain_is_kept_only_after_two_launches_and_a_later_one_of_the_parent() -> None:
    wishes, said = played(EVEN | {"C high": 150.0}, before=record())
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.BETTER
    launches = list(dict.fromkeys(wish.split()[0] for wish in wishes))
    assert launches == ["C0", "B0", "C1", "B1"]
    assert "confirmed on a later launch of the parent" in said.verdict.reason
    assert said.verdict.rule["share"] == said.verdict.rule["given_back"] == RULE.false_keep_budget


def test_a_parent_that_got_as_fast_meanwhile_confirms_nothing() -> None:
    sides = [(Arm.CANDIDATE, 0, 150.0), (Arm.BASELINE, 0, 100.0), (Arm.CANDIDATE, 1, 150.0)]
    own = tuple(run for arm, number, high in sides for run in twice(arm, number, high))
    assert wanted(need_of(compare(*own, before=record()))) == "B1 high"
    said = assess(compare(*own, *twice(Arm.BASELINE, 1, 150.0), before=record()))
    assert said.verdict is None or said.verdict.outcome is not Outcome.BETTER


def test_one_launch_cannot_carry_a_keep() -> None:
    sides = [(Arm.CANDIDATE, 0, 101.0), (Arm.BASELINE, 0, 100.0), (Arm.CANDIDATE, 1, 190.0), (Arm.BASELINE, 1, 100.0)]
    own = tuple(run for arm, number, high in sides for run in twice(arm, number, high))
    said = assess(compare(*own, before=record()))
    assert said.verdict is None or said.verdict.outcome is not Outcome.BETTER


def test_a_keep_names_the_load_points_at_which_a_loss_could_hide() -> None:
    _, said = played(EVEN | {"C high": 180.0, "C low": 48.0}, before=record())
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.BETTER
    assert said.verdict.rule["no_gain"] < 0.01
    assert "unguarded within the tolerance: low" in said.verdict.reason


@pytest.mark.parametrize(
    ("speeds", "rule", "outcome", "launches", "reason"),
    [
        pytest.param({"C high": 90.0}, QUIET, Outcome.WORSE, 1, "objective -10.0 %", id="slower at once"),
        pytest.param({"C high": 130.0, "C low": 30.0}, RULE, Outcome.WORSE, 1, "low loses: -40.0 %", id="great harm"),
        pytest.param({"C high": 130.0, "C low": 46.0}, RULE, Outcome.WORSE, 2, "low loses: -8.0 %", id="some harm"),
        pytest.param({}, QUIET, Outcome.NO_DIFFERENCE, 1, "the chance of a gain of 2% is 0.021", id="hopeless"),
        pytest.param({"C high": 49.0}, RULE, Outcome.COLLAPSED, 1, "high: one run reached 49%", id="collapse"),
        pytest.param(
            {"C high": 130.0, "C low": 20.0}, RULE, Outcome.COLLAPSED, 1, "low: one run reached 40%", id="elsewhere"
        ),
    ],
)
def test_every_way_to_end_without_a_keep(
    speeds: dict[str, float], rule: JudgeRule, outcome: Outcome, launches: int, reason: str
) -> None:
    wishes, said = played(EVEN | speeds, before=record(), rule=rule)
    assert said.verdict is not None
    assert said.verdict.outcome is outcome
    assert reason in said.verdict.reason
    assert len({wish.split()[0] for wish in wishes if wish.startswith("C")}) == launches


def test_what_is_too_noisy_to_tell_is_given_up_before_all_launches_are_spent() -> None:
    told = Rehearsal(Script(np.full((300, 1), math.log(1.03))), Server(1, 300, 0.05, 0.05)).play()
    undecided = told.rulings == course.Ruling.UNDECIDED
    assert undecided.any()
    assert told.launches.max() <= RULE.max_blocks
    assert told.launches[undecided].mean() < RULE.max_blocks


def test_a_loss_within_the_tolerance_is_no_harm() -> None:
    _, said = played(EVEN | {"C high": 150.0, "C low": 48.5}, before=record())
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.BETTER


@pytest.mark.parametrize(("limit", "name"), [("ttft_p90_ms", "ttft_ms"), ("tpot_p90_ms", "tpot_ms")])
def test_a_gain_that_breaks_a_latency_ceiling_is_worse(limit: str, name: str) -> None:
    guarded = WORKLOAD.model_copy(update={"guards": Guards.model_validate({limit: 500.0})})
    before = tuple(with_latency(run, name, 390.0) for run in record())
    over = tuple(with_latency(run, name, 800.0) for run in candidate(0, high=150.0))
    under = tuple(with_latency(run, name, 400.0) for run in candidate(0, high=150.0))
    verdict = verdict_of(compare(*over, before=before, workload=guarded))
    assert verdict.outcome is Outcome.WORSE
    assert re.search(rf"high: {name[:4]} p90 800 ms \[\d+, \d+\], ceiling 500 ms", verdict.reason)
    assert assess(compare(*under, before=before, workload=guarded)).verdict is None
    assert assess(compare(*candidate(0, high=150.0), before=before, workload=guarded)).verdict is None


def test_a_slow_baseline_breaks_no_ceiling_for_the_candidate() -> None:
    guarded = WORKLOAD.model_copy(update={"guards": Guards(ttft_p90_ms=500.0)})
    slow = tuple(with_latency(run, "ttft_ms", 900.0) for run in record())
    alike = tuple(with_latency(run, "ttft_ms", 910.0) for run in candidate(0, high=150.0))
    slower = tuple(with_latency(run, "ttft_ms", 1500.0) for run in candidate(0, high=150.0))
    assert assess(compare(*alike, before=slow, workload=guarded)).verdict is None
    verdict = verdict_of(compare(*slower, before=slow, workload=guarded))
    assert verdict.outcome is Outcome.WORSE
    assert "which the parent is above as well" in verdict.reason


def latent(speeds: dict[str, float], p90_ms: dict[Arm, list[float]], **fields: Any) -> Verdict:
    """Play to the end with TTFT p90 drawn in turn from a list per arm; the verdict."""
    own: tuple[Measurement, ...] = ()
    before = tuple(with_latency(run, "ttft_ms", p90_ms[Arm.BASELINE][n % 4]) for n, run in enumerate(record()))
    while (said := assess(compare(*own, before=before, **fields))).need is not None:
        run = wish(said.need, speeds[f"{wanted(said.need)[0]} {said.need.load_point}"])
        row = p90_ms[said.need.arm]
        own = (*own, with_latency(run, "ttft_ms", row[len(own) % len(row)]))
    assert said.verdict is not None
    return said.verdict


@pytest.mark.parametrize(
    ("ceiling_ms", "allowed", "outcome", "reason"),
    [
        pytest.param(1000.0, False, Outcome.BETTER, "confirmed on a later launch", id="far below it"),
        pytest.param(520.0, False, Outcome.INCONCLUSIVE, "an SLO is not shown to hold: high: ttft p90", id="too near"),
        pytest.param(520.0, True, Outcome.BETTER, "SLO not shown to hold: high: ttft p90", id="near, but allowed"),
        pytest.param(400.0, True, Outcome.WORSE, "ceiling 400 ms", id="above it, which nothing allows"),
    ],
)
def test_a_ceiling_must_be_shown_to_hold_before_a_gain_is_kept(
    ceiling_ms: float, allowed: bool, outcome: Outcome, reason: str
) -> None:
    slo = Ceiling(metric="ttft", percentile="p90", max_ms=ceiling_ms, at=("high",))
    guards = Guards(slo=(slo,), keep_unproven_slo=allowed)
    noisy = {Arm.BASELINE: [330.0, 420.0, 350.0, 300.0], Arm.CANDIDATE: [470.0, 560.0, 420.0, 540.0]}
    workload = WORKLOAD.model_copy(update={"guards": guards})
    verdict = latent(EVEN | {"C high": 150.0}, noisy, workload=workload)
    assert verdict.outcome is outcome, verdict.reason
    assert reason in verdict.reason


def test_a_session_may_ask_for_a_proof_at_the_other_load_points() -> None:
    strict = WORKLOAD.model_copy(update={"guards": Guards(keep_unguarded=False)})
    _, said = played(EVEN | {"C high": 180.0, "C low": 48.0}, before=record(), workload=strict)
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.INCONCLUSIVE
    assert "a loss beyond the tolerance can't be excluded at low" in said.verdict.reason


def test_a_candidate_that_does_not_start_has_failed() -> None:
    verdict = verdict_of(compare(start_failure="oom: out of memory", before=record()))
    assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, "oom: out of memory")


def test_a_candidate_that_its_own_log_speaks_against_is_worse_whatever_its_figures() -> None:
    fast = tuple(taken(Arm.CANDIDATE, 0, point, 900.0) for point in ("high", "low"))
    verdict = verdict_of(compare(*fast, complaint="numerics: NaN in the logits", before=record()))
    assert (verdict.outcome, verdict.reason) == (Outcome.WORSE, "numerics: NaN in the logits")


def test_a_run_that_was_ended_as_hopeless_is_a_collapse_though_it_has_no_figures() -> None:
    ended = taken(
        Arm.CANDIDATE, 0, "high", 0.0, status=MeasurementStatus.INVALID, reasons=(COLLAPSED, "1.0 tok/s after 60 s")
    )
    verdict = verdict_of(compare(ended, before=record()))
    assert (verdict.outcome, verdict.reason) == (Outcome.COLLAPSED, "high: 1.0 tok/s after 60 s")


def test_the_close_out_confirms_only_when_all_of_it_was_measured() -> None:
    faster = EVEN | {"C high": 150.0, "C low": 75.0}
    wishes, said = played(faster, purpose=Purpose.CLOSE_OUT)
    assert said.verdict is not None
    assert (said.verdict.outcome, len(wishes)) == (Outcome.BETTER, 12)
    assert said.verdict.rule["share"] == RULE.false_keep_budget
    wishes, said = played(EVEN | {"C high": 80.0}, purpose=Purpose.CLOSE_OUT)
    assert said.verdict is not None
    assert (said.verdict.outcome, len(wishes)) == (Outcome.INCONCLUSIVE, 12)


def test_the_close_out_holds_the_final_answers_against_the_original_ones() -> None:
    faster = EVEN | {"C high": 150.0, "C low": 75.0}
    asked = {"purpose": Purpose.CLOSE_OUT, "parent_answers": (simulated_answers(1, "same"),) * 2}
    for kind, outcome in (("close", Outcome.BETTER), ("broken", Outcome.WORSE)):
        _, said = played(faster, **asked, candidate_answers=(simulated_answers(1, kind),))
        assert said.verdict is not None
        assert said.verdict.outcome is outcome, said.verdict.reason


def test_the_more_experiments_the_more_a_keep_must_show() -> None:
    sides = [(Arm.CANDIDATE, 0, 109.0), (Arm.BASELINE, 0, 100.0), (Arm.CANDIDATE, 1, 107.0), (Arm.BASELINE, 1, 101.0)]
    own = tuple(run for arm, number, high in sides for run in twice(arm, number, high))
    assert verdict_of(compare(*own, before=record(), left=1)).outcome is Outcome.BETTER
    assert assess(compare(*own, before=record(), left=10**6)).verdict is None


@pytest.mark.parametrize(
    ("fields", "returned"),
    [
        pytest.param({"start_failure": "oom"}, True, id="never measured"),
        pytest.param({"own": taken(Arm.CANDIDATE, 0, "high", 20.0)}, False, id="collapsed"),
        pytest.param({"observes": True}, False, id="an observation has no share"),
    ],
)
def test_only_what_was_not_used_of_the_share_comes_back(fields: dict[str, Any], returned: bool) -> None:
    own = [fields.pop("own")] if "own" in fields else []
    verdict = close(compare(*own, before=record(), left=10, **fields), verdict_word(fields, own), "r")
    back = verdict.rule["given_back"]
    assert back == (verdict.rule["share"] if returned else 0.0)


def verdict_word(fields: dict[str, Any], own: list[Measurement]) -> Outcome:
    """The outcome that goes with the case."""
    if own:
        return Outcome.COLLAPSED
    return Outcome.OBSERVED if fields.get("observes") else Outcome.FAILED


def test_a_verdict_asked_for_from_outside_has_the_data_beside_it() -> None:
    comparison = compare(*candidate(0, high=120.0), *baseline(0), before=record())
    verdict = close(comparison, Outcome.INCONCLUSIVE, "the time is up")
    assert (verdict.outcome, verdict.reason) == (Outcome.INCONCLUSIVE, "the time is up")
    assert verdict.objective == objective_effect(comparison)
    assert set(verdict.points) == {"high", "low"}
    assert verdict.evidence == tuple(run.id for run in comparison.own)
    assert verdict.rule["minimal_effect"] == RULE.minimal_effect


# --- what never counts ---


@pytest.mark.parametrize("status", [MeasurementStatus.INVALID, MeasurementStatus.OPEN, MeasurementStatus.LOST])
@pytest.mark.parametrize("arm", list(Arm))
def test_runs_that_are_not_valid_change_nothing(status: MeasurementStatus, arm: Arm) -> None:
    absurd = (taken(arm, 1, "high", 1e6, id="a", status=status), taken(arm, 1, "low", 1e-3, id="b", status=status))
    runs = (*candidate(0, high=120.0), *baseline(0))
    assert assess(compare(*runs, *absurd, before=record())) == assess(compare(*runs, before=record()))
    assert seen(*runs, *absurd) == seen(*runs)
    plain, beside = (close(compare(*some), Outcome.OBSERVED, "r") for some in (runs, (*runs, *absurd)))
    assert (plain.objective, plain.points) == (beside.objective, beside.points)


@pytest.mark.parametrize("tok_s", [None, 0.0])
def test_a_run_without_throughput_is_wanted_again(tok_s: float | None) -> None:
    empty = taken(Arm.CANDIDATE, 0, "high", 1.0, metrics=metrics(1.0, output_tok_s=tok_s))
    assert wanted(need_of(compare(empty, before=record()))) == "C0 high"


# --- runs in progress ---

STEADY = Pace(tok_s=100.0, duration_s=30.0, e2e_p99_s=6.0)


@pytest.mark.parametrize(
    ("elapsed_s", "tokens", "pace_then", "said"),
    [
        pytest.param(11.9, 0, STEADY, None, id="first answers are not overdue yet"),
        pytest.param(12.0, 0, STEADY, "0.0 tok/s after 12 s", id="overdue and nothing came"),
        pytest.param(12.0, 299, STEADY, "25% of the baseline's 100.0", id="just below half of the ratio"),
        pytest.param(12.0, 301, STEADY, None, id="slow, and still worth a whole run"),
        pytest.param(89.0, 4000, STEADY, None, id="long, within what the ratio allows"),
        pytest.param(91.0, 9000, STEADY, "still running after 91 s", id="longer than the ratio allows"),
        pytest.param(
            44.0, 0, Pace(tok_s=100.0, duration_s=30.0, e2e_p99_s=30.0), None, id="all answers come at the end"
        ),
        pytest.param(1.9, 0, Pace(tok_s=100.0, duration_s=1.0, e2e_p99_s=0.1), None, id="a short run gets two seconds"),
        pytest.param(0.0, 0, STEADY, None, id="at the very start"),
    ],
)
def test_a_run_in_progress_collapses_only_when_it_cannot_recover(
    elapsed_s: float, tokens: int, pace_then: Pace, said: str | None
) -> None:
    found = collapsing(elapsed_s, tokens, pace_then, RULE)
    assert found is None if said is None else found is not None and said in found


def test_the_pace_is_that_of_the_parents_newest_run() -> None:
    fields: dict[str, Any] = {"e2e_ms": Summary(p99=4000.0), "duration_s": 20.0}
    newest = taken(Arm.BASELINE, 0, "high", 80.0, metrics=metrics(80.0, **fields))
    assert pace(compare(newest, before=record()), "high") == Pace(tok_s=80.0, duration_s=20.0, e2e_p99_s=4.0)
    assert pace(compare(before=record()), "high") == Pace(tok_s=100.0, duration_s=10.0, e2e_p99_s=10.0)
    assert pace(compare(), "high") is None


# --- how often it errs ---


def rehearsed(server: Server, effects: np.ndarray) -> np.ndarray:
    """Rulings of nights that are played side by side."""
    return Rehearsal(Script(effects), server).play().rulings


def test_nights_of_pure_noise_keep_nothing_more_often_than_the_budget_allows() -> None:
    """So many nights with a keep would be seen in more than one case of a thousand if the rate were the budget's 5 %:
    the assertion has a margin of its own and doesn't just compare a lucky count with the budget.
    """
    nights = 1000
    for run, launch in ((0.03, 0.0), (0.02, 0.02), (0.002, 0.06)):
        rulings = rehearsed(Server(1, nights, run, launch), np.zeros((nights, 10)))
        kept = int((rulings == course.Ruling.KEEP).any(axis=1).sum())
        assert stats.binom.sf(kept, nights, RULE.false_keep_budget) > 0.001, f"{kept} of {nights} nights at {run}"


def test_a_large_gain_in_noise_is_nearly_always_found() -> None:
    """So few misses would be seen in less than one case of twenty if one gain in twenty were missed."""
    nights = 500
    rulings = rehearsed(Server(1, nights, 0.02, 0.01), np.full((nights, 1), math.log(1.15)))
    missed = int((rulings != course.Ruling.KEEP).sum())
    assert stats.binom.cdf(missed, nights, 0.05) < 0.05, f"{missed} of {nights} missed"


def test_every_share_of_a_night_together_stays_within_the_budget() -> None:
    """What was spent less what came back, keeps aside, never exceeds what there is."""
    night = Night(Server(3, 1, 0.02, 0.02), experiments=8)
    words = [night.judge().outcome for _ in range(8)]
    spent = sum(share - back for share, back in night.earlier)
    assert len(words) == 8
    assert 0 <= spent <= RULE.false_keep_budget
    assert all(0 <= back <= share for share, back in night.earlier)


@pytest.mark.parametrize("seed", range(4))
def test_rehearsed_nights_are_judged_exactly_as_sessions_are(seed: int) -> None:
    """The same luck, once run by run through stored measurements, once through the arrays of the rehearsal."""
    gains = [0.0, 0.06, 0.0, -0.03, 0.1, 0.0]
    session = Night(Server(seed, 1, 0.02, 0.01), experiments=len(gains))
    dismissed = {Outcome.NO_DIFFERENCE: Outcome.INCONCLUSIVE}  # two words for one ruling, by what chance was left
    words = [dismissed.get(said, said) for said in (session.judge(gain).outcome for gain in gains)]
    told = Rehearsal(Script(np.log1p(np.array([gains]))), Server(seed, 1, 0.02, 0.01)).play()
    named = {
        course.Ruling.KEEP: Outcome.BETTER,
        course.Ruling.HOPELESS: Outcome.INCONCLUSIVE,
        course.Ruling.HARM: Outcome.WORSE,
        course.Ruling.UNDECIDED: Outcome.INCONCLUSIVE,
    }
    assert [named[course.Ruling(int(ruling))] for ruling in told.rulings[0]] == words
    assert len(session.runs) + RULE.baseline_runs == told.night_runs[0]


def test_the_same_runs_are_always_judged_alike() -> None:
    nights = [Night(Server(7, 1, 0.05, 0.01), experiments=2) for _ in range(2)]
    assert nights[0].judge(0.1) == nights[1].judge(0.1)


# --- leaving one out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "outcome", "launches"),
    [
        pytest.param(70.0, Outcome.WORSE, 1, id="plainly missed after one launch of each"),
        pytest.param(99.4, Outcome.INCONCLUSIVE, 2, id="it looks a little missed"),
        pytest.param(100.5, Outcome.NO_DIFFERENCE, 2, id="it is not missed"),
        pytest.param(140.0, Outcome.BETTER, 2, id="it only does harm by now"),
    ],
)
def test_a_kept_change_is_left_out_only_when_it_is_not_missed(without: float, outcome: Outcome, launches: int) -> None:
    speeds = EVEN | {"C high": without, "C low": without / 2}
    wishes, said = played(speeds, before=record(), purpose=Purpose.WITHOUT)
    assert said.verdict is not None
    assert said.verdict.outcome is outcome, said.verdict.reason
    assert len({wish.split()[0] for wish in wishes if wish.startswith("C")}) == launches
    assert said.verdict.rule["share"] == 0


def test_a_sentinel_is_no_veto_matter_and_gives_nothing_back() -> None:
    slower_elsewhere = EVEN | {"C low": 40.0}
    _, said = played(slower_elsewhere, before=record(), purpose=Purpose.SENTINEL)
    assert said.verdict is not None
    assert said.verdict.outcome is not Outcome.WORSE
    assert said.verdict.rule["share"] == RULE.false_keep_budget
    assert said.verdict.rule["given_back"] == 0
