"""Which todo comes next, why, and what is passed over."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent.chooser import Situation, choose, in_order, minutes, moved_priorities
from agent.policy import Costs, Spent
from state.models import Budget, Experiment, FlagChange, HotCall, JudgeRule, Outcome, Policy, Todo, TodoStatus, Verdict
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
    assert minutes(todo("a"), situation) == pytest.approx(2 * 2 * 50.0 / 60)
    assert minutes(todo("b", "load"), situation) == pytest.approx(4 * 20.0 / 60)


def test_the_reason_says_what_decided() -> None:
    choice = choose(at(*ORDERED[3:]))
    assert choice.todo is not None and choice.todo.id == "x-first-tier"
    assert "least disruptive level with something ready is restart; of its 6: tier 1, priority 0.10" in choice.reason
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
