"""When the evidence turns the search to another topic, and when it must not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agent.direction import TOPIC_SINKS, Turn, topic_of, turn
from state.models import Effect, Experiment, FlagChange, Outcome, Purpose, Source, Todo, TodoStatus, Verdict

SMALL = Effect(
    estimate=0.001, low=-0.01, high=0.012, n_baseline=4, n_candidate=2, launches_baseline=2, launches_candidate=1
)


def todo(name: str, *tags: str, status: TodoStatus = TodoStatus.PENDING, **fields: Any) -> Todo:
    whole = {"id": name, "title": f"the {name}", "hypothesis": "h", "tags": tags, "tier": 1, "expected_gain": 0.1}
    changes = (FlagChange(name=f"--{name}", value="1"),)
    experiment = Experiment.model_validate(whole | {"changes": changes} | fields)
    return Todo(experiment=experiment, status=status, priority=experiment.priority)


def done(name: str, *tags: str, **fields: Any) -> Todo:
    return todo(name, *tags, status=TodoStatus.DONE, **fields)


def verdict(name: str, outcome: Outcome = Outcome.NO_DIFFERENCE) -> Verdict:
    return Verdict(
        experiment_id=name, outcome=outcome, reason="r", objective=SMALL, evidence=(f"M-{name}-1", f"M-{name}-2")
    )


def judged(*verdicts: Verdict) -> Mapping[str, Verdict]:
    return {one.experiment_id: one for one in verdicts}


OVERLAP = done("overlap", "communication", "overlap")
FUSION = todo("fusion", "communication", "fusion", status=TodoStatus.IN_PROGRESS)
NCCL = todo("nccl", "communication", "nccl", priority=0.6)
STEPS = todo("steps", "scheduling", priority=0.5)
LIST = (OVERLAP, FUSION, NCCL, STEPS)


def turned(last: Verdict, *earlier: Verdict, todos: tuple[Todo, ...] = LIST) -> Turn | None:
    return turn(last, judged(*earlier), todos, todos)


def test_the_second_in_a_row_that_does_nothing_turns_the_search_away() -> None:
    found = turned(verdict("fusion", Outcome.COLLAPSED), verdict("overlap"))
    assert found is not None
    assert found.what == "turn away from communication; first in line is the steps (scheduling)"
    assert found.reason == (
        "communication is not the bottleneck here: overlap no relevant difference (+0.1 % [-1.0, +1.2]); "
        "fusion collapsed (+0.1 % [-1.0, +1.2]); the rest of it sinks: nccl 0.60 → 0.30"
    )
    assert found.evidence == ("M-overlap-1", "M-overlap-2", "M-fusion-1", "M-fusion-2")
    assert found.priorities == (("nccl", pytest.approx(0.6 * TOPIC_SINKS)),)
    assert found.finding.startswith("communication is not the bottleneck here: overlap")


def test_one_alone_says_nothing() -> None:
    assert turned(verdict("fusion")) is None


def test_a_third_does_not_say_it_again() -> None:
    more = (done("mscclpp", "communication"), *LIST)
    assert turned(verdict("fusion"), verdict("mscclpp"), verdict("overlap"), todos=more) is None


def test_a_gain_in_between_ends_the_row() -> None:
    more = (done("mscclpp", "communication"), *LIST)
    assert turned(verdict("fusion"), verdict("overlap"), verdict("mscclpp", Outcome.BETTER), todos=more) is None


@pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.FAILED, Outcome.INVALID])
def test_what_was_not_judged_neither_counts_nor_ends_the_row(outcome: Outcome) -> None:
    assert turned(verdict("fusion", outcome), verdict("overlap")) is None
    more = (done("odd", "communication"), *LIST)
    assert turned(verdict("fusion"), verdict("overlap"), verdict("odd", outcome), todos=more) is not None


def test_what_was_blocked_was_not_judged_by_its_figures() -> None:
    blocked = OVERLAP.model_copy(update={"status": TodoStatus.BLOCKED})
    assert turned(verdict("fusion"), verdict("overlap", Outcome.WORSE), todos=(blocked, *LIST[1:])) is None


def test_with_nothing_left_of_the_topic_there_is_nothing_to_decide() -> None:
    assert turned(verdict("fusion"), verdict("overlap"), todos=(OVERLAP, FUSION, STEPS)) is None


def test_other_topics_and_checks_of_the_loop_do_not_count() -> None:
    other = done("graphs", "launch-overhead")
    assert turned(verdict("fusion"), verdict("graphs"), todos=(other, *LIST[1:])) is None
    sentinel = done("overlap", "communication", purpose=Purpose.SENTINEL)
    assert turned(verdict("fusion"), verdict("overlap"), todos=(sentinel, *LIST[1:])) is None
    observation = done("overlap", "communication", changes=())
    assert turned(verdict("fusion"), verdict("overlap"), todos=(observation, *LIST[1:])) is None


def test_a_higher_tier_of_the_topic_still_comes_first_and_the_decision_says_so() -> None:
    low = todo("steps", "scheduling", tier=2)
    found = turned(verdict("fusion"), verdict("overlap"), todos=(OVERLAP, FUSION, NCCL, low))
    assert found is not None
    assert found.what.endswith("first in line is the nccl (communication)")


def test_a_keep_turns_towards_its_topic_only_if_the_order_changes() -> None:
    kept = todo("fusion", "communication", status=TodoStatus.IN_PROGRESS)
    low, high = todo("nccl", "communication", priority=0.4), todo("nccl", "communication", priority=0.6)
    before, after = (kept, low, STEPS), (kept, high, STEPS)
    found = turn(verdict("fusion", Outcome.BETTER), {}, before, after)
    assert found is not None
    assert found.what == "turn to communication; first in line is the nccl (communication)"
    assert "the steps was first in line before" in found.reason
    assert (found.finding, found.priorities) == ("", ())
    assert turn(verdict("fusion", Outcome.BETTER), {}, before, before) is None
    assert turn(verdict("fusion", Outcome.BETTER), {}, after, after) is None


@pytest.mark.parametrize(
    ("tags", "topic"),
    [
        (("communication", "moe"), "communication"),
        (("moe", "compute"), "compute"),
        (("threads", "placement"), "threads"),
        ((), None),
    ],
)
def test_the_topic_is_the_bottleneck_among_the_tags_else_the_first_of_them(
    tags: tuple[str, ...], topic: str | None
) -> None:
    assert topic_of(todo("x", *tags).experiment) == topic


def test_refinements_that_do_nothing_say_nothing_of_their_topic() -> None:
    of = {"source": Source(kind="refinement")}
    refined = (done("overlap", "communication", **of), todo("fusion", "communication", **of), NCCL, STEPS)
    assert turned(verdict("fusion", Outcome.WORSE), verdict("overlap"), todos=refined) is None
    assert turned(verdict("fusion"), verdict("overlap"), todos=(refined[0], *LIST[1:])) is None
