"""What the session file allows and what the budgets can still pay."""

from __future__ import annotations

from typing import Any

import pytest

from agent.policy import (
    Costs,
    Spent,
    admission,
    broken_constraints,
    close_out_s,
    comparison_s,
    forbidden,
    needed_disruption,
    observation_s,
    out_of_time,
    price,
    unaffordable,
)
from state.models import (
    Budget,
    Change,
    Disruption,
    EnvChange,
    Experiment,
    FlagChange,
    HotCall,
    JudgeRule,
    LaunchSpec,
    Policy,
    TodoStatus,
)
from tests.agent.judging import WORKLOAD

RULE = JudgeRule(min_blocks=2, max_runs=1, close_out_blocks=2, baseline_runs=4)
COSTS = Costs(launch_s=30.0, run_s={"low": 5.0, "high": 15.0})  # a block is 50 s
CLOSE_OUT_S = 5 * 30.0 + 4 * 20.0 + 15.0  # the last run confirms what is left
THREADS = FlagChange(name="--threads", value="4")
SPIN = EnvChange(name="OMP_WAIT_POLICY", value="active")
LIVE = HotCall(name="poll", value="100", undo="50")


def idea(*changes: Change, **fields: Any) -> Experiment:
    return Experiment.model_validate({"title": "t", "hypothesis": "h", "changes": changes} | fields)


def spent(elapsed_s: float = 0.0, experiments: int = 0, restarts: int = 0) -> Spent:
    return Spent(elapsed_s=elapsed_s, experiments=experiments, restarts=restarts)


@pytest.mark.parametrize(
    ("experiment", "wanted"),
    [
        (idea(THREADS, disruption="read"), Disruption.RESTART),
        (idea(SPIN, disruption="hot"), Disruption.RESTART),
        (idea(LIVE, disruption="read"), Disruption.HOT),
        (idea(LIVE, THREADS, disruption="read"), Disruption.RESTART),
        (idea(THREADS, disruption="host"), Disruption.HOST),
        (idea(disruption="load"), Disruption.LOAD),
    ],
)
def test_changes_imply_a_disruption_that_no_declaration_can_lower(experiment: Experiment, wanted: Disruption) -> None:
    assert needed_disruption(experiment) is wanted


@pytest.mark.parametrize(
    ("experiment", "policy", "said"),
    [
        (idea(THREADS), {}, None),
        (idea(THREADS), {"max_disruption": "hot"}, "needs restart, the session allows hot at most"),
        (idea(LIVE, disruption="hot"), {"max_disruption": "hot"}, None),
        (idea(THREADS, disruption="patch"), {}, "needs patch, the session allows restart at most"),
        (idea(THREADS, tags=("speculation",)), {"drop": ("speculation",)}, "drops everything tagged speculation"),
        (idea(THREADS, tags=("threads",)), {"drop": ("speculation",)}, None),
        (idea(SPIN, THREADS), {"keep_flags": ("--threads",)}, "keeps --threads as it is"),
        (idea(FlagChange(name="--threads", remove=True)), {"keep_flags": ("--threads",)}, "keeps --threads as it is"),
        (idea(THREADS), {"keep_flags": ("--parallel",)}, None),
        (idea(SPIN), {"keep_env": {"OMP_WAIT_POLICY": "passive"}}, "OMP_WAIT_POLICY must stay passive"),
        (idea(SPIN), {"keep_env": {"OMP_WAIT_POLICY": "active"}}, None),
        (idea(EnvChange(name="A")), {"keep_env": {"A": "1"}}, "A must stay 1"),
    ],
)
def test_what_the_session_file_forbids_is_named(
    experiment: Experiment, policy: dict[str, Any], said: str | None
) -> None:
    found = forbidden(experiment, Policy.model_validate(policy))
    assert found is None if said is None else found is not None and said in found


@pytest.mark.parametrize(
    ("experiment", "policy", "status", "said"),
    [
        (idea(THREADS), {}, TodoStatus.PENDING, ""),
        (idea(THREADS, id="t"), {"gate": ("restart",)}, TodoStatus.GATED, "restart to be approved"),
        (idea(THREADS, id="t", tags=("x",)), {"gate": ("x", "t")}, TodoStatus.GATED, "t, x to be approved"),
        (idea(THREADS, id="t"), {"gate": ("hot", "y")}, TodoStatus.PENDING, ""),
        (idea(THREADS, id="t"), {"gate": ("restart",), "approved": ("t",)}, TodoStatus.PENDING, ""),
        (idea(THREADS, disruption="host"), {}, TodoStatus.SKIPPED, "needs host"),
        (idea(THREADS, disruption="host"), {"max_disruption": "host"}, TodoStatus.GATED, "it changes the host"),
        (
            idea(THREADS, disruption="host", tags=("x",)),
            {"max_disruption": "host", "approved": ("x",)},
            TodoStatus.PENDING,
            "",
        ),
        (idea(THREADS, disruption="host", id="t"), {"approved": ("t",)}, TodoStatus.SKIPPED, "needs host"),
        (idea(disruption="load"), {"gate": ("load",)}, TodoStatus.PENDING, ""),
    ],
)
def test_an_experiment_goes_on_the_list_as_the_session_file_wants(
    experiment: Experiment, policy: dict[str, Any], status: TodoStatus, said: str
) -> None:
    admitted = admission(experiment, Policy.model_validate(policy))
    assert admitted.status is status
    assert said in admitted.reason and bool(said) == bool(admitted.reason)


def test_hard_constraints_are_checked_on_the_whole_spec() -> None:
    spec = LaunchSpec(
        engine="e", program=("p",), flags={}, argv=("p",), cwd="/", user="u", env={"A": "1", "B": "wrong"}
    )
    policy = Policy(keep_env={"A": "1", "B": "2", "C": "3"})
    assert broken_constraints(spec, policy) == ["B must be 2, is wrong", "C must be 3, is unset"]


def test_prices_follow_launches_and_runs() -> None:
    assert COSTS.block_s(WORKLOAD) == 50.0
    assert Costs(launch_s=1.0, run_s={"low": 5.0}, default_run_s=7.0).block_s(WORKLOAD) == 13.0
    assert comparison_s(WORKLOAD, RULE, COSTS) == 4 * 50.0
    assert observation_s(WORKLOAD, RULE, COSTS) == 4 * 20.0
    assert close_out_s(WORKLOAD, RULE, COSTS) == CLOSE_OUT_S


ENOUGH_S = 200.0 + CLOSE_OUT_S
ENOUGH_RESTARTS = 4 + 5


@pytest.mark.parametrize(
    ("experiment", "budget", "used", "said"),
    [
        (idea(THREADS), {"time_s": ENOUGH_S}, spent(), None),
        (idea(THREADS), {"time_s": ENOUGH_S}, spent(1.0), "needs about 200 s, 199 s are left before the reserved"),
        (idea(THREADS), {"time_s": CLOSE_OUT_S}, spent(50.0), "0 s are left before the reserved close-out"),
        (idea(disruption="load"), {"time_s": 80.0 + CLOSE_OUT_S}, spent(), None),
        (idea(disruption="load"), {"time_s": 79.0 + CLOSE_OUT_S}, spent(), "needs about 80 s"),
        (idea(THREADS), {"restarts": ENOUGH_RESTARTS}, spent(), None),
        (idea(THREADS), {"restarts": ENOUGH_RESTARTS}, spent(restarts=1), "needs 4 restarts, 3 are left before the"),
        (idea(THREADS), {"restarts": 5}, spent(restarts=7), "needs 4 restarts, 0 are left"),
        (idea(LIVE, disruption="hot"), {"restarts": 5}, spent(), None),
        (idea(THREADS), {"experiments": 3}, spent(experiments=2), None),
        (idea(THREADS), {"experiments": 3}, spent(experiments=3), "all 3 experiments of the budget are used"),
        (idea(disruption="load"), {"experiments": 0}, spent(), None),
    ],
)
def test_the_close_out_is_reserved_before_each_experiment(
    experiment: Experiment, budget: dict[str, Any], used: Spent, said: str | None
) -> None:
    policy = Policy(budget=Budget.model_validate(budget))
    found = unaffordable(experiment, policy, used, WORKLOAD, RULE, COSTS)
    assert found is None if said is None else found is not None and said in found


def test_the_first_runs_need_no_close_out_since_their_price_is_a_guess() -> None:
    look, guessed = idea(disruption="load"), Costs(launch_s=COSTS.launch_s)
    needed = price(look, WORKLOAD, RULE, guessed).seconds
    for time_s, said in ((needed, None), (needed - 1.0, f"needs about {needed:.0f} s")):
        found = unaffordable(look, Policy(budget=Budget(time_s=time_s)), spent(), WORKLOAD, RULE, guessed)
        assert found is None if said is None else found is not None and said in found
    closing = spent().model_copy(update={"open_s": needed - 1.0})
    assert unaffordable(look, Policy(), closing, WORKLOAD, RULE, guessed) is not None


@pytest.mark.parametrize(
    ("budget", "used", "said"),
    [
        ({"time_s": CLOSE_OUT_S + 50.0}, spent(), None),
        ({"time_s": CLOSE_OUT_S + 50.0}, spent(1.0), "the time budget of 295 s is used up but for the reserved"),
        ({"restarts": 6}, spent(), None),
        ({"restarts": 6}, spent(restarts=1), "the 6 restarts of the budget are used up"),
    ],
)
def test_an_experiment_under_way_ends_in_time_for_the_close_out(
    budget: dict[str, Any], used: Spent, said: str | None
) -> None:
    found = out_of_time(Policy(budget=Budget.model_validate(budget)), used, WORKLOAD, RULE, COSTS)
    assert found is None if said is None else found is not None and said in found
