"""Which todo comes next, why, and what is passed over."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent.chooser import Situation, choose, cost, in_order, moved_priorities
from agent.policy import Costs, Spent
from state.models import (
    Budget,
    Disruption,
    Experiment,
    FlagChange,
    HotCall,
    JudgeRule,
    Outcome,
    Policy,
    Todo,
    TodoStatus,
    Verdict,
)
from tests.agent.judging import WORKLOAD

CHANGES = {
    "restart": (FlagChange(name="--threads", value="4"),),
    "hot": (HotCall(name="poll", value="100", undo="50"),),
    "load": (),
    "read": (),
}


def todo(name: str, level: str = "restart", status: TodoStatus = TodoStatus.PENDING, **fields: Any) -> Todo:
    whole = {"id": name, "title": name, "hypothesis": "h", "changes": CHANGES[level], "disruption": level}
    experiment = Experiment.model_validate(whole | {"expected_gain": 0.1} | fields)
    return Todo(experiment=experiment, status=status, priority=experiment.priority)


def at(*todos: Todo, budget: dict[str, Any] | None = None, blocked: frozenset[str] = frozenset()) -> Situation:
    return Situation(
        todos=todos,
        policy=Policy(budget=Budget.model_validate(budget or {})),
        rule=JudgeRule(max_runs=1, baseline_runs=4),
        workload=WORKLOAD,
        spent=Spent(elapsed_s=0.0, experiments=0, restarts=0),
        costs=Costs(launch_s=30.0, run_s={"low": 5.0, "high": 15.0}),
        blocked_capabilities=blocked,
    )


ORDERED = (
    todo("z-read", "read", tier=3, priority=0.1),
    todo("z-load", "load", tier=3, priority=0.1),
    todo("y-hot", "hot", tier=3, priority=0.1),
    todo("x-first-tier", tier=1, priority=0.1, expected_gain=0.01),
    todo("w-second-tier", tier=2, priority=0.9, expected_gain=0.01),
    todo("v-second-tier", tier=2, priority=0.5, expected_gain=0.3),
    todo("b-second-tier", tier=2, priority=0.5, expected_gain=0.1),
    todo("c-second-tier", tier=2, priority=0.5, expected_gain=0.1),
    todo("a-third-tier", tier=3, priority=1.0, expected_gain=9.0),
)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_observation_disruption_tier_priority_gain_and_id(seed: int) -> None:
    shuffled = list(ORDERED)
    random.Random(seed).shuffle(shuffled)
    assert [item.id for item in in_order(at(*shuffled))] == [item.id for item in ORDERED]
    chosen = choose(at(*shuffled)).todo
    assert chosen is not None and chosen.id == "z-read"


def test_the_gain_counts_per_minute() -> None:
    situation = at()
    restart, hot, load = (cost(todo("a", level), situation) for level in ("restart", "hot", "load"))
    assert (restart.launches, restart.down_s, restart.bench_s) == (4, 4 * 30.0, 4 * 20.0)
    assert (hot.launches, hot.down_s, hot.bench_s) == (0, 0.0, 4 * 20.0)
    assert (load.launches, load.seconds) == (0, 4 * 20.0)


def test_a_level_costs_what_its_own_launches_took() -> None:
    costs = Costs(launch_s=30.0, level_s={Disruption.PATCH: 300.0}, run_s={"low": 5.0, "high": 15.0})
    situation = at().model_copy(update={"costs": costs})
    assert cost(todo("a", disruption="patch"), situation).down_s == 4 * 300.0
    assert cost(todo("b"), situation).down_s == 4 * 30.0


# --- shares ---

LADDER = (todo("hot", "hot"), todo("restart"), todo("patch", disruption="patch"))


def shared(*todos: Todo, share: float = 0.5, **used: float) -> Situation:
    """An hour of budget, with what levels have used of it already."""
    used_s = {Disruption[name.upper()]: seconds for name, seconds in used.items()}
    policy = Policy(max_disruption=Disruption.HOST, budget=Budget(time_s=3600.0), level_share=share)
    spent = Spent(elapsed_s=sum(used.values()), experiments=0, restarts=0)
    return at(*todos).model_copy(update={"policy": policy, "spent": spent, "used_s": used_s})


@pytest.mark.parametrize(
    ("used", "share", "taken"),
    [
        ({}, 0.5, "hot"),
        ({"hot": 1000.0}, 0.5, "hot"),
        ({"hot": 1700.0}, 0.5, "restart"),
        ({"hot": 1700.0}, 1.0, "hot"),
        ({"hot": 1700.0, "restart": 600.0}, 0.5, "restart"),
        ({"hot": 1700.0, "restart": 800.0}, 0.5, "patch"),
        ({"hot": 1700.0, "restart": 800.0, "patch": 500.0}, 0.5, "patch"),
    ],
)
def test_a_level_that_had_its_share_lets_the_next_one_go_first(
    used: dict[str, float], share: float, taken: str
) -> None:
    chosen = choose(shared(*LADDER, share=share, **used)).todo
    assert chosen is not None and chosen.id == taken


def test_the_reason_tells_of_a_share_that_moved_the_choice() -> None:
    reason = choose(shared(*LADDER, hot=1700.0)).reason
    assert "hot has used 51% of the 56 min left at its turn" in reason
    assert "so restart comes first; next level with something ready is restart" in reason
    assert "share" not in choose(shared(*LADDER)).reason


def test_with_nothing_above_it_a_level_may_use_everything() -> None:
    chosen = choose(shared(todo("hot", "hot"), hot=3000.0)).todo
    assert chosen is not None and chosen.id == "hot"


def test_no_level_is_denied_its_first_experiment() -> None:
    chosen = choose(shared(todo("restart"), todo("patch", disruption="patch"), share=0.01)).todo
    assert chosen is not None and chosen.id == "restart"


def test_the_reason_says_what_decided() -> None:
    choice = choose(at(*ORDERED[3:]))
    assert choice.todo is not None and choice.todo.id == "x-first-tier"
    assert "least disruptive level with something ready is restart; of its 6: tier 1, priority 0.10" in choice.reason
    assert "hoped gain 1% for about 3.3 min, 2.0 of them without a server" in choice.reason
    assert "an observation blocks nothing" in choose(at(*ORDERED)).reason


@pytest.mark.parametrize("status", [status for status in TodoStatus if status is not TodoStatus.PENDING])
def test_only_what_is_pending_is_chosen(status: TodoStatus) -> None:
    choice = choose(at(todo("a", status=status)))
    assert (choice.todo, choice.skipped) == (None, ())
    assert in_order(at(todo("a", status=status))) == []


def test_what_depends_on_something_blocked_is_passed_over() -> None:
    needy = todo("needy", tier=1, needs=("graphs", "flash"))
    choice = choose(at(needy, todo("free", tier=2), blocked=frozenset({"flash"})))
    assert choice.todo is not None and choice.todo.id == "free"
    assert choice.skipped == (("needy", "needs flash, which is blocked"),)


def test_what_is_forbidden_or_too_dear_is_passed_over_with_its_reason() -> None:
    patch = todo("patch", disruption="patch")
    choice = choose(at(patch, todo("dear"), todo("cheap", "load"), budget={"time_s": 400.0}))
    assert choice.todo is not None and choice.todo.id == "cheap"
    reasons = dict(choice.skipped)
    assert "needs patch" in reasons["patch"]
    assert "before the reserved close-out" in reasons["dear"]


def test_with_nothing_ready_the_choice_is_none_and_every_todo_has_a_reason() -> None:
    choice = choose(at(todo("a"), todo("b"), budget={"experiments": 0}))
    assert choice.todo is None
    assert [name for name, _ in choice.skipped] == ["a", "b"]
    assert "nothing on the list" in choice.reason


# --- priorities move with relatives ---


def judged(outcome: Outcome) -> Verdict:
    return Verdict(experiment_id="judged", outcome=outcome, reason="r")


@pytest.mark.parametrize(
    ("outcome", "priority", "word"),
    [
        (Outcome.BETTER, 0.6, "rises"),
        (Outcome.WORSE, 0.35, "sinks"),
        (Outcome.NO_DIFFERENCE, 0.35, "sinks"),
        (Outcome.COLLAPSED, 0.35, "sinks"),
    ],
)
def test_a_result_moves_its_relatives(outcome: Outcome, priority: float, word: str) -> None:
    relative, stranger = todo("relative", tags=("threads", "numa")), todo("stranger", tags=("cache",))
    ((name, new, reason),) = moved_priorities(judged(outcome), ("threads",), (relative, stranger))
    assert name == "relative"
    assert new == pytest.approx(priority)
    assert reason == f"{word}: shares threads with judged, which was {outcome}"


@pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.INVALID, Outcome.FAILED, Outcome.OBSERVED])
def test_what_says_nothing_about_the_idea_moves_nobody(outcome: Outcome) -> None:
    assert moved_priorities(judged(outcome), ("threads",), (todo("relative", tags=("threads",)),)) == []


def test_only_pending_relatives_move_and_never_above_one() -> None:
    top = todo("top", tags=("threads",), priority=1.0)
    high = todo("high", tags=("threads",), priority=0.9)
    done = todo("done", tags=("threads",), status=TodoStatus.DONE)
    moved = moved_priorities(judged(Outcome.BETTER), ("threads",), (top, high, done))
    assert [(name, priority) for name, priority, _ in moved] == [("high", 1.0)]
