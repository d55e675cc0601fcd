"""What of an answer's bytes is read as an answer: whole and exact, or a named fault; nothing is ever mended."""

from __future__ import annotations

import json

import pytest

from agent.planners.answer import Fault, Misfit, Said, read_answer, read_body, tidy
from state.exchanges import Reply, Silence
from tests.agent.model_sessions import FASTER, plan
from tests.stubs.chat import completion

WHOLE = json.dumps(plan(FASTER))


def kind(text: str | None, finish: str | None = "stop", **message: object) -> object:
    answer = read_answer(read_body(completion(text, finish, **message)))
    return answer.kind if isinstance(answer, Fault) else "said"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", Misfit.EMPTY),
        (None, Misfit.EMPTY),
        (" \n\t ", Misfit.EMPTY),
        ("I would try more threads.", Misfit.PROSE),
        ("[]", Misfit.PROSE),
        ("null", Misfit.PROSE),
        (f"```json\n{WHOLE}\n```", Misfit.FENCED),
        (f"Here you are:\n{WHOLE}", Misfit.EXTRA_TEXT),
        (f"<think>hm</think>{WHOLE}", Misfit.EXTRA_TEXT),
        (f"{WHOLE}\nGood luck!", Misfit.EXTRA_TEXT),
        (f"{WHOLE}{WHOLE}", Misfit.EXTRA_TEXT),
        ('{"experiments": [}', Misfit.BROKEN),
        ('{"reason": "a", "reason": "b"}', Misfit.BROKEN),
        ('{"experiments": [{"expected_gain": NaN}]}', Misfit.BROKEN),
        ('{"experiments": ' + "[" * 100_000, Misfit.BROKEN),
        ('{"reason": "a", "command": "rm -rf /"}', Misfit.WRONG_SCHEMA),
        ('{"experiments": "all of them"}', Misfit.WRONG_SCHEMA),
        ('{"experiments": {"title": "one"}}', Misfit.WRONG_SCHEMA),
    ],
)
def test_what_is_not_exactly_what_was_asked_for_has_a_name(text: str | None, fault: Misfit) -> None:
    assert kind(text) == fault


def test_the_reason_for_ending_is_looked_at_before_anything_is_read() -> None:
    assert kind(WHOLE) == "said"
    assert kind(WHOLE, "length") == Misfit.TRUNCATED
    assert kind(WHOLE, "content_filter") == Misfit.REFUSED
    assert kind(WHOLE, None) == Misfit.UNFINISHED
    assert kind(WHOLE, "tool_calls") == Misfit.UNFINISHED
    assert kind(WHOLE, refusal="I can't help with that") == Misfit.REFUSED


def test_an_answer_that_is_cut_at_any_character_is_never_read() -> None:
    assert {kind(WHOLE[:at]) for at in range(1, len(WHOLE))} == {Misfit.BROKEN}


def test_a_body_that_is_cut_at_any_byte_is_never_read() -> None:
    body = completion(WHOLE)
    silences = {read_body(body[:at]).silence for at in range(len(body))}
    assert silences == {Silence.CUT}
    assert read_body(body).silence is None


@pytest.mark.parametrize(
    "body",
    [
        b"<html>bad gateway</html>",
        b"{}",
        b"[]",
        b'"hello"',
        b'{"choices": []}',
        b'{"choices": [null]}',
        b'{"choices": [{"text": "an older API"}]}',
        b'{"choices": [{"message": "hello"}]}',
        b'{"error": {"message": "status 200 all the same"}}',
    ],
)
def test_what_is_no_completion_is_said_to_be_none(body: bytes) -> None:
    assert read_body(body).silence is Silence.NO_COMPLETION


def test_bytes_that_are_no_text_and_halves_of_characters_can_be_stored() -> None:
    assert read_body(b"\xff\xfe{").silence is Silence.NO_COMPLETION
    reply = read_body(b'{"choices": [{"finish_reason": "stop", "message": {"content": "\\ud800 \\u0000"}}]}')
    assert Reply.model_validate_json(reply.model_dump_json()) == reply


def test_tokens_are_believed_only_where_they_are_counts() -> None:
    told = json.loads(completion(WHOLE))
    assert (read_body(json.dumps(told).encode()).prompt_tokens, told["usage"]["prompt_tokens"]) == (100, 100)
    for wrong in (None, "many", {"prompt_tokens": -5, "completion_tokens": True}, {"prompt_tokens": 10**12}):
        reply = read_body(json.dumps({**told, "usage": wrong}).encode())
        assert (reply.prompt_tokens, reply.output_tokens) == (None, None)


def test_an_empty_plan_is_an_answer() -> None:
    assert read_answer(Reply(text="{}", finish="stop")) == Said()


def test_words_are_made_harmless_before_anybody_sees_them() -> None:
    assert tidy("a\x1b[31m red\n| cell <img onerror=x>", 60) == "a [31m red / cell ‹img onerror=x›"
    assert tidy("x" * 500, 10) == "x" * 9 + "…"
