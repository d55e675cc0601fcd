"""The budget of a language model: reserved before a request, and spent in full where nobody can tell."""

from __future__ import annotations

import pytest

from agent.planners.spend import FREE, Used, charged, reserve, used
from state.exchanges import Ask, Exchange, Message, Reply, Silence
from tests.agent.model_sessions import section

SECTION = section("http://stub/v1", max_calls=3, max_tokens=1000, answer_tokens=100)
PRICED = section("http://stub/v1", price_in=1.0, price_out=10.0, max_cost=2.0, answer_tokens=100)
HELLO = (Message(role="user", content="x" * 200),)
ASK = Ask(
    id="X1", round=1, model="m", prompt="p", form="plain", messages=HELLO, answer_tokens=100,
    reserved_tokens=300, reserved_cost=1.5,
)  # fmt: skip


def test_what_is_under_way_counts_with_all_that_was_set_aside() -> None:
    done = Exchange(ask=ASK, reply=Reply(tokens=120, cost=0.2))
    assert used([done, Exchange(ask=ASK)]) == Used(calls=2, tokens=420, cost=1.7)


def test_a_request_is_paid_as_the_endpoint_counted() -> None:
    counted = Reply(text="x", prompt_tokens=100, output_tokens=20)
    assert (charged(PRICED, ASK, counted).tokens, charged(PRICED, ASK, counted).cost) == (120, 0.3)


@pytest.mark.parametrize("silence", list(Silence))
def test_in_doubt_all_that_was_set_aside_is_spent(silence: Silence) -> None:
    paid = charged(PRICED, ASK, Reply(silence=silence))
    assert (paid.tokens, paid.cost) == ((0, 0.0) if silence in FREE else (300, 1.5))
    uncounted = charged(PRICED, ASK, Reply(text="x", prompt_tokens=100))
    assert (uncounted.tokens, uncounted.cost) == (300, 1.5)


def test_a_reserve_is_more_than_the_words_and_the_answer_can_take() -> None:
    found = reserve(PRICED, [], HELLO, schema_bytes=0)
    assert not isinstance(found, str)
    assert found.tokens >= 200 / 4 + 100
    assert found.cost == pytest.approx((found.tokens - 100) / 1000 + 1.0)


def test_each_ceiling_closes_before_it_is_reached() -> None:
    paid = Exchange(ask=ASK, reply=Reply(tokens=100))
    assert reserve(SECTION, [paid] * 3, HELLO, 0) == "all 3 requests of its budget are used"
    nearly = Exchange(ask=ASK, reply=Reply(tokens=900))
    assert "would exceed its budget of 1000, 900 are used" in str(reserve(SECTION, [nearly], HELLO, 0))
    dear = Exchange(ask=ASK, reply=Reply(cost=1.5))
    assert "would exceed its budget of 2, 1.5 are used" in str(reserve(PRICED, [dear], HELLO, 0))
    assert "would exceed" in str(reserve(SECTION, [], HELLO, schema_bytes=5000))
