"""A conversation gone through again from what is stored: what is said next, how often, and when it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from agent.planners.answer import LOOK_UPS, Misfit, Said
from agent.planners.screen import Refused, Screened
from agent.planners.talk import AGAIN, ECHO, LOOKS, Standing, Talk, form_to_use, look_ups_in, standing
from state.exchanges import Ask, Exchange, Form, Message, Reply, Silence
from state.models import Experiment
from tests.agent.model_sessions import NOTHING, plan

OPENING = (Message(role="system", content="rules"), Message(role="user", content="table"))


def screen(said: Said, before: Sequence[Experiment]) -> Screened:
    """Takes what is called good."""
    good = [one for one in said.experiments if one["title"].startswith("good")]
    accepted = [
        Experiment(id=f"model-{len(before) + n}", title=one["title"], hypothesis="") for n, one in enumerate(good)
    ]
    refused = [Refused(what=one["title"], why="it is bad") for one in said.experiments if one not in good]
    return Screened(accepted=tuple(accepted), refused=tuple(refused))


TALK = Talk(opening=OPENING, screen=screen)
GOOD = plan({"title": "good 1"}, reason="a hunch")
MIXED = plan({"title": "good 1"}, {"title": "bad"})
LOOK = plan(look_ups=[{"kind": "help", "of": "--threads"}])


def after(*replies: object) -> Standing:
    """The form of each request is that which follows from the replies before it."""
    made: list[Exchange] = []
    for one in replies:
        following = standing(TALK, made).next
        made.append(exchange(one, "plain" if following is None else following.form))
    return standing(TALK, made)


def exchange(reply: object, form: Form = "schema") -> Exchange:
    ask = Ask(
        id="X1", round=1, model="m", prompt="p", form=form, messages=OPENING, answer_tokens=9,
        reserved_tokens=9, reserved_cost=0,
    )  # fmt: skip
    if isinstance(reply, Silence):
        return Exchange(ask=ask, reply=Reply(silence=reply, detail="so it was"))
    return Exchange(ask=ask, reply=reply if isinstance(reply, Reply) else Reply(text=json.dumps(reply), finish="stop"))


def last_words(stands: Standing) -> str:
    assert stands.next is not None
    return stands.next.messages[-1].content


def test_it_begins_with_the_rules_and_the_table_and_ends_with_a_good_answer() -> None:
    first = after()
    assert first.next is not None
    assert first.next.messages == OPENING
    done = after(GOOD)
    assert (done.next, [one.title for one in done.accepted], done.reason) == (None, ["good 1"], "a hunch")


def test_an_empty_plan_ends_it() -> None:
    assert after(NOTHING).next is None


def test_what_was_refused_is_told_back_once_and_what_was_accepted_stays() -> None:
    told = after(MIXED)
    assert "Refused: bad: it is bad" in last_words(told)
    assert "Accepted: good 1" in last_words(told)
    done = after(MIXED, plan({"title": "good 2"}, {"title": "bad again"}))
    assert done.next is None
    assert [one.id for one in done.accepted] == ["model-0", "model-1"]
    assert [one.what for one in done.refused] == ["bad", "bad again"]


@pytest.mark.parametrize(
    ("text", "finish", "fault"),
    [
        ("x" * 9000, "stop", Misfit.PROSE),
        ("", "stop", Misfit.EMPTY),
        ("{}", "length", Misfit.TRUNCATED),
        ("```\n{}\n```", "stop", Misfit.FENCED),
        ("{", "stop", Misfit.BROKEN),
    ],
)
def test_a_fault_is_told_back_and_after_two_more_the_conversation_is_over(
    text: str, finish: str, fault: Misfit
) -> None:
    bad = Reply(text=text, finish=finish)
    once = after(bad)
    assert fault.value in last_words(once)
    assert once.next is not None
    assert 0 < len(once.next.messages[-2].content) <= ECHO
    assert after(bad, bad).next is not None
    over = after(*[bad] * (AGAIN + 1))
    assert (over.next, over.accepted, len(over.faults)) == (None, (), AGAIN + 1)
    assert after(bad, bad, GOOD).accepted


def test_refusals_and_faults_share_the_two_chances() -> None:
    bad = Reply(text="prose", finish="stop")
    assert after(bad, MIXED).next is not None
    assert after(bad, MIXED, bad).next is None
    assert after(bad, bad, MIXED).next is None


@pytest.mark.parametrize("silence", [Silence.UNREACHABLE, Silence.RATE_LIMITED, Silence.SERVER_ERROR, Silence.CUT])
def test_what_may_pass_is_tried_again_after_a_growing_pause(silence: Silence) -> None:
    first, second = after(silence), after(silence, silence)
    assert first.next is not None and second.next is not None
    assert first.next.messages == OPENING
    assert 0 < first.next.wait_s < second.next.wait_s
    assert after(*[silence] * (AGAIN + 1)).next is None


def test_the_endpoints_own_pause_is_kept() -> None:
    stands = after(Reply(silence=Silence.RATE_LIMITED, retry_after_s=17.0))
    assert stands.next is not None
    assert stands.next.wait_s == 17.0


@pytest.mark.parametrize("silence", [Silence.UNAUTHORISED, Silence.TIMEOUT, Silence.TOO_LONG])
def test_what_would_be_the_same_again_ends_it(silence: Silence) -> None:
    assert after(silence).next is None


def test_a_form_that_is_refused_gives_way_to_a_simpler_one() -> None:
    forms = [after(*[Silence.REJECTED] * times).next for times in range(5)]
    assert [None if one is None else one.form for one in forms] == ["exact", "schema", "object", "plain", None]
    assert after(Silence.REJECTED, GOOD).faults == ()


def test_the_form_that_was_taken_last_is_used_first() -> None:
    assert form_to_use([]) == "exact"
    refused, taken = exchange(Silence.REJECTED), exchange(GOOD, form="plain")
    assert form_to_use([refused, taken, exchange(Silence.TIMEOUT, form="object")]) == "plain"


def test_look_ups_are_answered_a_few_times_only() -> None:
    once = after(LOOK)
    assert once.next is not None
    assert (once.next.messages[-1].role, once.next.look_ups) == ("assistant", tuple(LOOK["look_ups"]))
    found = once.next.with_found("it takes an integer")
    assert "it takes an integer" in found.messages[-1].content
    assert found.look_ups == ()
    assert after(*[LOOK] * LOOKS).next is not None
    assert after(*[LOOK] * (LOOKS + 1)).next is None
    assert after(LOOK, GOOD).accepted


def test_a_request_nobody_waited_for_is_not_taken_for_an_answer() -> None:
    stands = after(Silence.LOST)
    assert [fault.kind for fault in stands.faults] == [Silence.LOST]
    assert stands.next is not None


def test_what_was_said_stands_in_the_requests_and_is_not_made_anew() -> None:
    told = (*OPENING, Message(role="user", content="found in a log that has gone since"))
    asked = exchange(LOOK), exchange(MIXED)
    later = asked[1].model_copy(update={"ask": asked[1].ask.model_copy(update={"messages": told})})
    stands = standing(TALK, [asked[0], later])
    assert stands.next is not None
    assert stands.next.messages[: len(told)] == told


def test_texts_that_were_asked_for_are_counted_as_far_as_they_are_granted_at_once() -> None:
    many = plan(look_ups=[{"kind": "help", "of": "--threads"}] * 9)
    beside = plan({"title": "good"}, look_ups=[{"kind": "help", "of": "--threads"}])
    assert look_ups_in([exchange(many), exchange(LOOK), exchange(beside), exchange(Silence.LOST)]) == LOOK_UPS + 1
