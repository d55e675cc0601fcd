"""The judge on data made for it: every verdict, which run it wants, what it never counts, and how often it errs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from agent.judge import (
    Pace,
    assess,
    close,
    collapsing,
    effect_at,
    false_keep_share,
    noise_at,
    objective_effect,
    pace,
)
from agent.validity import COLLAPSED
from state.models import Arm, Guards, JudgeRule, MeasurementStatus, Objective, Outcome, Summary
from tests.agent.judging import (
    QUIET,
    RULE,
    WORKLOAD,
    Night,
    baseline,
    candidate,
    compare,
    metrics,
    need_of,
    played,
    record,
    taken,
    verdict_of,
    wanted,
    with_latency,
)

EVEN = {"C high": 100.0, "C low": 50.0, "B high": 100.0, "B low": 50.0}

# --- noise ---


def test_before_anything_is_seen_the_noise_is_the_prior() -> None:
    noise = noise_at("high", (), RULE)
    assert (noise.sd, noise.df) == pytest.approx((RULE.noise_prior, RULE.noise_prior_df))


def test_noise_is_pooled_within_specs_and_shrunk_towards_the_prior() -> None:
    groups = [("high", "a", 1.0), ("high", "a", 1.2), ("high", "b", 5.0), ("high", "b", 5.4), ("high", "c", 9.0)]
    squares, freedom = 2 * 0.1**2 + 2 * 0.2**2, 2
    wanted_variance = (RULE.noise_prior_df * RULE.noise_prior**2 + squares) / (RULE.noise_prior_df + freedom)
    noise = noise_at("high", groups, RULE)
    assert noise.sd == pytest.approx(math.sqrt(wanted_variance))
    assert noise.df == RULE.noise_prior_df + freedom


def test_a_load_point_has_its_own_noise() -> None:
    assert noise_at("high", [("low", "a", 1.0), ("low", "a", 3.0)], RULE) == noise_at("high", (), RULE)


def test_what_a_change_does_is_no_noise() -> None:
    near = [("high", "a", 1.0), ("high", "a", 1.1), ("high", "b", 1.0), ("high", "b", 1.1)]
    far = [("high", "a", 1.0), ("high", "a", 1.1), ("high", "b", 9.0), ("high", "b", 9.1)]
    assert noise_at("high", near, RULE).sd == pytest.approx(noise_at("high", far, RULE).sd)


def test_less_noise_than_the_floor_is_never_believed() -> None:
    groups = [("high", "a", 1.0)] * 1000
    assert noise_at("high", groups, RULE).sd == RULE.noise_floor


# --- effects ---


def test_an_effect_is_a_log_ratio_with_the_interval_of_a_student_t() -> None:
    comparison = compare(*baseline(0), *candidate(0, high=110.0))
    effect = effect_at(comparison, "high")
    assert effect is not None
    noise = noise_at("high", comparison.groups, RULE)
    margin = stats.t.ppf(0.975, noise.df) * noise.sd * math.sqrt(2)
    assert effect.estimate == pytest.approx(math.log(1.1))
    assert (effect.estimate - effect.low, effect.high - effect.estimate) == pytest.approx((margin, margin))


def test_the_objective_is_the_mean_over_its_load_points() -> None:
    both = WORKLOAD.model_copy(update={"objective": Objective(at=("low", "high"))})
    effect = objective_effect(compare(*baseline(0), *candidate(0, high=121.0, low=50.0), workload=both))
    assert effect is not None
    assert effect.estimate == pytest.approx(math.log(1.21) / 2)


def test_there_is_no_effect_before_both_arms_were_measured() -> None:
    assert effect_at(compare(*candidate(0)), "high") is None
    assert objective_effect(compare(*baseline(0))) is None


def test_of_the_record_only_the_newest_launch_is_compared() -> None:
    old = tuple(run.model_copy(update={"id": f"old-{run.id}", "trial_id": "old"}) for run in record(high=10.0))
    effect = effect_at(compare(*candidate(0, high=110.0), before=(*old, *record())), "high")
    assert effect is not None
    assert (effect.estimate, effect.n_baseline) == pytest.approx((math.log(1.1), 4))


# --- which run is next ---


def test_with_a_record_the_candidate_is_screened_first_and_then_they_take_turns() -> None:
    wishes, said = played(EVEN, before=record())
    turns = [f"{arm}{n} {point}" for n in range(4) for arm in "CB" for point in ("high", "low")]
    assert wishes == turns
    assert said.verdict is not None and said.verdict.outcome is Outcome.INCONCLUSIVE


def test_without_a_record_the_baseline_comes_first() -> None:
    wishes, _ = played(EVEN)
    assert wishes[:4] == ["B0 high", "B0 low", "C0 high", "C0 low"]


def test_a_record_with_a_gap_at_one_load_point_is_no_record() -> None:
    gap = tuple(run for run in record() if run.load_point == "high")
    assert wanted(need_of(compare(before=gap))) == "B0 high"


def test_the_objectives_load_points_come_first_then_those_with_less_load() -> None:
    at_low = WORKLOAD.model_copy(update={"objective": Objective(at=("low",))})
    wishes, _ = played(EVEN, before=record(), workload=at_low)
    assert wishes[:4] == ["C0 low", "C0 high", "B0 low", "B0 high"]


def test_the_close_out_is_balanced_against_drift_and_ignores_the_record() -> None:
    slower = record(high=10.0, low=5.0)
    wishes, said = played(EVEN, before=slower, close_out=True)
    assert [wish.split()[0] for wish in wishes[::2]] == ["C0", "B0", "B1", "C1"]
    assert [wish.split()[1] for wish in wishes] == ["high", "low"] * 4
    assert said.verdict is not None and said.verdict.outcome is Outcome.INCONCLUSIVE


def test_an_observation_measures_what_runs_and_nothing_else() -> None:
    wishes, said = played(EVEN, observation=True)
    assert wishes == [f"B{n} {point}" for n in range(RULE.baseline_runs) for point in ("high", "low")]
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.OBSERVED
    assert "high 100.0 tok/s" in said.verdict.reason


# --- verdicts ---


def test_a_gain_is_kept_only_after_enough_launches_and_a_baseline_of_its_own() -> None:
    wishes, said = played(EVEN | {"C high": 150.0}, before=record())
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.BETTER
    launches = {wish.split()[0] for wish in wishes}
    assert launches == {"C0", "B0", "C1"}
    assert "budgeted lower bound" in said.verdict.reason
    assert said.verdict.rule["alpha_per_look"] == pytest.approx(RULE.false_keep_budget / 3)


def test_a_record_alone_never_keeps() -> None:
    fast = (*candidate(0, high=190.0), *candidate(1, high=190.0), *candidate(2, high=190.0))
    assert wanted(need_of(compare(*fast, before=record()))) == "B0 high"


def test_nothing_is_kept_or_given_up_in_the_middle_of_a_block() -> None:
    decided = (*candidate(0, high=150.0), *baseline(0))
    half = taken(Arm.CANDIDATE, 1, "high", 150.0)
    assert wanted(need_of(compare(*decided, half, before=record()))) == "C1 low"
    assert verdict_of(compare(*decided, *candidate(1, high=150.0), before=record())).outcome is Outcome.BETTER
    slow = taken(Arm.CANDIDATE, 0, "high", 90.0)
    assert wanted(need_of(compare(slow, before=record(), rule=QUIET))) == "C0 low"


def test_a_keep_names_the_load_points_at_which_a_loss_could_hide() -> None:
    wishes, said = played(EVEN | {"C high": 180.0, "C low": 48.0}, before=record())
    assert said.verdict is not None
    assert (said.verdict.outcome, len(wishes)) == (Outcome.BETTER, 6)
    assert "unguarded within the tolerance: low" in said.verdict.reason


@pytest.mark.parametrize(
    ("speeds", "rule", "outcome", "launches", "reason"),
    [
        pytest.param({"C high": 90.0}, QUIET, Outcome.WORSE, 1, "objective -10.0 %", id="slower at once"),
        pytest.param({"C high": 130.0, "C low": 30.0}, RULE, Outcome.WORSE, 1, "low loses: -40.0 %", id="great harm"),
        pytest.param({"C high": 130.0, "C low": 46.0}, RULE, Outcome.WORSE, 2, "low loses: -8.0 %", id="some harm"),
        pytest.param({}, QUIET, Outcome.NO_DIFFERENCE, 1, "cannot reach 2%", id="hopeless"),
        pytest.param({}, RULE, Outcome.INCONCLUSIVE, 4, "after 4 launches", id="too noisy to tell"),
        pytest.param({"C high": 49.0}, RULE, Outcome.COLLAPSED, 1, "high: one run reached 49%", id="collapse"),
        pytest.param({"C low": 20.0}, RULE, Outcome.COLLAPSED, 1, "low: one run reached 40%", id="collapse elsewhere"),
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


def test_a_loss_within_the_tolerance_is_no_harm() -> None:
    _, said = played(EVEN | {"C high": 150.0, "C low": 48.5}, before=record())
    assert said.verdict is not None
    assert said.verdict.outcome is Outcome.BETTER


@pytest.mark.parametrize(("limit", "name"), [("ttft_p90_ms", "ttft_ms"), ("tpot_p90_ms", "tpot_ms")])
def test_a_gain_that_breaks_a_latency_ceiling_is_worse(limit: str, name: str) -> None:
    guarded = WORKLOAD.model_copy(update={"guards": Guards.model_validate({limit: 500.0})})
    over = tuple(with_latency(run, name, 800.0) for run in candidate(0, high=150.0))
    under = tuple(with_latency(run, name, 400.0) for run in candidate(0, high=150.0))
    verdict = verdict_of(compare(*over, before=record(), workload=guarded))
    assert verdict.outcome is Outcome.WORSE
    assert f"{name[:4]} p90 800 ms is above 500 ms" in verdict.reason
    assert assess(compare(*under, before=record(), workload=guarded)).verdict is None
    assert assess(compare(*candidate(0, high=150.0), before=record(), workload=guarded)).verdict is None


def test_a_slow_baseline_breaks_no_ceiling_for_the_candidate() -> None:
    guarded = WORKLOAD.model_copy(update={"guards": Guards(ttft_p90_ms=500.0)})
    slow = tuple(with_latency(run, "ttft_ms", 900.0) for run in baseline(0))
    fast = tuple(with_latency(run, "ttft_ms", 400.0) for run in candidate(0, high=150.0))
    assert wanted(need_of(compare(*fast, *slow, before=record(), workload=guarded))) == "C1 high"


def test_a_candidate_that_does_not_start_has_failed() -> None:
    verdict = verdict_of(compare(start_failure="oom: out of memory", before=record()))
    assert (verdict.outcome, verdict.reason) == (Outcome.FAILED, "oom: out of memory")


def test_a_run_that_was_ended_as_hopeless_is_a_collapse_though_it_has_no_figures() -> None:
    ended = taken(
        Arm.CANDIDATE, 0, "high", 0.0, status=MeasurementStatus.INVALID, reasons=(COLLAPSED, "1.0 tok/s after 60 s")
    )
    verdict = verdict_of(compare(ended, before=record()))
    assert (verdict.outcome, verdict.reason) == (Outcome.COLLAPSED, "high: 1.0 tok/s after 60 s")


def test_the_close_out_confirms_only_when_all_of_it_was_measured() -> None:
    faster = EVEN | {"C high": 150.0, "C low": 75.0}
    wishes, said = played(faster, close_out=True)
    assert said.verdict is not None
    assert (said.verdict.outcome, len(wishes)) == (Outcome.BETTER, 8)
    assert said.verdict.rule["alpha_per_look"] == RULE.false_keep_budget
    wishes, said = played(EVEN | {"C high": 80.0}, close_out=True)
    assert said.verdict is not None
    assert (said.verdict.outcome, len(wishes)) == (Outcome.INCONCLUSIVE, 8)


@pytest.mark.parametrize(
    ("share", "rule", "alpha"),
    [(1, RULE, 0.05 / 3), (10, RULE, 0.005 / 3), (0, RULE, 0.05 / 3), (10, JudgeRule(max_blocks=2), 0.005)],
)
def test_the_false_keep_budget_is_divided_among_experiments_and_looks(
    share: int, rule: JudgeRule, alpha: float
) -> None:
    assert false_keep_share(compare(share=share, rule=rule)) == pytest.approx(alpha)


def test_the_more_experiments_the_more_a_keep_must_show() -> None:
    runs = (*candidate(0, high=118.0), *baseline(0), *candidate(1, high=118.0))
    assert verdict_of(compare(*runs, before=record(), share=1)).outcome is Outcome.BETTER
    assert assess(compare(*runs, before=record(), share=1000)).verdict is None


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
    assert compare(*runs, *absurd).groups == compare(*runs).groups
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


def test_nights_of_pure_noise_keep_nothing_more_often_than_the_budget_allows() -> None:
    """So few nights with a keep would be seen in less than one case of a thousand if the rate were the budget's 5 %:
    the assertion has a margin of its own and doesn't just compare a lucky count with the budget.
    """
    nights = 250
    kept = 0
    for seed in range(nights):
        night = Night(seed, run_noise=0.03)
        kept += any(night.judged(f"e{n}").outcome is Outcome.BETTER for n in range(10))
    assert stats.binom.cdf(kept, nights, RULE.false_keep_budget) < 0.001, f"{kept} of {nights} nights kept noise"


def test_a_large_gain_in_noise_is_nearly_always_found() -> None:
    """So few misses would be seen in less than one case of twenty if one gain in twenty were missed."""
    found = [Night(seed, run_noise=0.05).judged("gain", 0.3).outcome for seed in range(100)]
    missed = sum(1 for outcome in found if outcome is not Outcome.BETTER)
    assert stats.binom.cdf(missed, len(found), 0.05) < 0.05, f"{missed} of {len(found)} missed"


def test_the_same_runs_are_always_judged_alike() -> None:
    assert Night(7, run_noise=0.05).judged("e", 0.1) == Night(7, run_noise=0.05).judged("e", 0.1)
