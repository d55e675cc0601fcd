"""What a failure calls for by situation, and the bracket that opposite memory advice needs."""

from __future__ import annotations

import itertools

import pytest

from state.models import Failure
from tools.diagnose import Action, FailureClass, Rule, diagnose, rules
from tools.next_step import Attempt, Span, bracket, next_step

UP, DOWN = Action.ADJUST_UP, Action.ADJUST_DOWN
FRACTION = Span(low=0.3, high=0.97, step=0.04, resolution=0.01)
COLLECTIVE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, Timeout(ms)=600000)\n"


def steps(failure: Failure, *, known_good: bool = False, times: int = 3) -> list[Action]:
    return [next_step(failure, number, known_good=known_good) for number in range(1, times + 1)]


def test_a_collective_that_never_worked_is_tried_once_more_then_rejected() -> None:
    failure = diagnose("vllm", COLLECTIVE.format(1), 1)
    assert steps(failure) == [Action.RETRY_ONCE, Action.REJECT, Action.REJECT]


def test_a_collective_that_hangs_on_the_baseline_twice_ends_the_session() -> None:
    failure = diagnose("vllm", COLLECTIVE.format(203441), 1)
    assert steps(failure, known_good=True) == [Action.RESTORE, Action.ABORT, Action.ABORT]


def test_the_unknown_is_tried_once_more_then_rejected_and_on_the_baseline_ends_the_session() -> None:
    failure = diagnose("vllm", "KeyError: 'model.layers.0.mlp.gate'\n", 1)
    assert failure.failure_class == FailureClass.UNKNOWN
    assert steps(failure)[:2] == [Action.RETRY_ONCE, Action.REJECT]
    assert steps(failure, known_good=True)[:2] == [Action.RETRY_ONCE, Action.ABORT]


def test_memory_that_something_else_holds_is_cleaned_before_the_setting_is_blamed() -> None:
    log = (
        "ValueError: Free memory on device cuda:0 (3.1/94.9 GiB) on startup is less than desired GPU memory utilization"
    )
    failure = diagnose("vllm", log, 1)
    assert failure.failure_class == FailureClass.ENVIRONMENT
    assert steps(failure)[:2] == [Action.CLEAN_AND_RETRY_ONCE, DOWN]


def test_retractions_void_a_run_and_then_lower_the_requests() -> None:
    failure = diagnose("sglang", "KV cache pool is full. Retract requests. #retracted_reqs: 1\n", None)
    assert steps(failure)[:2] == [Action.INVALIDATE, DOWN]
    assert failure.knob == "--max-running-requests"


def test_a_setting_that_is_not_to_blame_is_skipped_but_known_good_without_its_package_needs_a_person() -> None:
    failure = diagnose("vllm", "ModuleNotFoundError: No module named 'flashinfer'\n", 1)
    assert steps(failure) == [Action.SKIP] * 3
    assert steps(failure, known_good=True)[0] is Action.ESCALATE


@pytest.mark.parametrize("rule", rules().rule, ids=lambda rule: rule.id)
def test_known_good_is_never_rejected_or_adjusted_and_nothing_is_retried_for_ever(rule: Rule) -> None:
    failure = Failure(failure_class="hang", cause="c", rule=rule.id, action=rule.action)
    forbidden = {Action.REJECT, UP, DOWN, Action.SKIP, Action.DISCARD}
    assert not forbidden & set(steps(failure, known_good=True))
    assert not {Action.RETRY_ONCE, Action.CLEAN_AND_RETRY_ONCE, Action.RESTORE} & set(steps(failure)[1:])


# --- the bracket -------------------------------------------------------------------------------------------


def test_more_is_asked_for_then_less_and_the_middle_is_tried() -> None:
    first = bracket([Attempt(0.80, UP)], FRACTION)
    assert first.value is not None and first.value > 0.80
    assert bracket([Attempt(0.92, DOWN)], FRACTION).value == pytest.approx(0.88)
    both = bracket([Attempt(0.80, UP), Attempt(0.92, DOWN)], FRACTION)
    assert (both.value, both.low, both.high) == (0.86, 0.80, 0.92)


def test_steps_in_one_direction_double() -> None:
    history = [Attempt(0.50, UP)]
    tried = []
    for _ in range(4):
        found = bracket(history, FRACTION)
        assert found.value is not None
        tried.append(found.value)
        history.append(Attempt(found.value, UP))
    assert tried == [0.54, 0.62, 0.78, 0.97]
    assert bracket(history, FRACTION).value is None
    assert "no value is left: 0.97 is too little" in bracket(history, FRACTION).reason


def test_a_limit_that_the_server_names_is_used() -> None:
    told = "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.35."
    failure = diagnose("sglang", f"{told} Raise --mem-fraction-static above 0.748 (minimum viable).\n", -9)
    found = bracket([Attempt(0.35, Action(failure.action), failure.bound)], FRACTION)
    assert (found.low, found.value) == (0.748, 0.79)


def test_it_stops_when_a_value_starts() -> None:
    found = bracket([Attempt(0.80, UP), Attempt(0.84)], FRACTION)
    assert found.value is None
    assert found.reason == "it starts with 0.84"


def test_it_stops_when_nothing_is_left_between() -> None:
    assert bracket([Attempt(0.85, UP), Attempt(0.86, DOWN)], FRACTION).value is None
    contradiction = bracket([Attempt(0.90, UP), Attempt(0.85, DOWN)], FRACTION)
    assert contradiction.value is None
    assert contradiction.reason == "no value is left: between 0.9, too little, and 0.85, too much"


@pytest.mark.parametrize("history", [[], [Attempt(0.5, Action.REJECT)], [Attempt(0.5)]])
def test_without_advice_there_is_nothing_to_bracket(history: list[Attempt]) -> None:
    assert bracket(history, FRACTION).value is None


@pytest.mark.parametrize(
    ("start", "needs", "breaks"), list(itertools.product((0.3, 0.6, 0.85, 0.97), (0.4, 0.7), (0.71, 0.9)))
)
def test_it_always_ends_and_never_tries_a_value_twice_or_one_that_is_known_to_fail(
    start: float, needs: float, breaks: float
) -> None:
    """A server that needs more than `needs` and dies from `breaks` on."""
    history: list[Attempt] = []
    value: float | None = start
    while value is not None:
        assert FRACTION.low <= value <= FRACTION.high
        assert value not in [attempt.value for attempt in history]
        history.append(Attempt(value, UP if value <= needs else DOWN if value >= breaks else None))
        if history[-1].asked is None:
            break
        value = bracket(history, FRACTION).value
    assert len(history) <= 12
    assert history[-1].asked is None or breaks - needs <= 0.02
