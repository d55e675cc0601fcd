"""One request over real HTTP: whatever the endpoint does, a reply or a named silence comes back, in time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from agent.planners.llm import LONGEST_BODY, ChatEndpoint
from agent.planners.shape import general
from state.exchanges import Ask, Form, Message, Reply, Silence
from tests.agent.model_sessions import ENVIRON, KEY, section
from tests.stubs.chat import Move, completion, cut, drops, hangs, says, sends, serving, stalls, status

pytestmark = pytest.mark.anyio
SCHEMA = general(["--threads"])
BODY = completion('{"reason": "a short one"}')
TINY = b'{"choices":[{"finish_reason":"stop","message":{"content":"{}"}}]}'
"""The shortest body that is an answer."""
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A developer's shell may name a proxy, and another endpoint."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield


def an_ask(form: Form = "schema") -> Ask:
    messages = (Message(role="system", content="rules"), Message(role="user", content="table"))
    return Ask(
        id="X1", round=1, model="a-model", prompt="planner 1", form=form, messages=messages, answer_tokens=77,
        reserved_tokens=1, reserved_cost=0,
    )  # fmt: skip


async def reply_to(move: Move, within_s: float = 20.0, **fields: object) -> Reply:
    with serving(move) as server:
        return await ChatEndpoint(section(server.url, **fields), ENVIRON).reply(an_ask(), SCHEMA, within_s)


async def test_an_answer_comes_back_with_its_counts() -> None:
    with serving(says("hello")) as server:
        reply = await ChatEndpoint(section(server.url), ENVIRON).reply(an_ask(), SCHEMA, 20)
    assert (reply.silence, reply.text, reply.finish) == (None, "hello", "stop")
    assert (reply.prompt_tokens, reply.output_tokens) == (100, 20)
    (sent,) = server.requests
    assert (sent["model"], sent["max_tokens"]) == ("a-model", 77)
    assert sent["messages"] == [{"role": "system", "content": "rules"}, {"role": "user", "content": "table"}]
    assert "temperature" not in sent
    assert server.keys == [f"Bearer {KEY}"]


FORMS = [("exact", "json_schema"), ("schema", "json_schema"), ("object", "json_object"), ("plain", None)]


@pytest.mark.parametrize(("form", "kind"), FORMS)
async def test_each_form_is_asked_for_in_the_apis_words(form: Form, kind: str | None) -> None:
    with serving(says("{}")) as server:
        await ChatEndpoint(section(server.url, temperature=0.2), ENVIRON).reply(an_ask(form), SCHEMA, 20)
    (sent,) = server.requests
    assert sent["temperature"] == 0.2
    if kind is None:
        assert "response_format" not in sent
        return
    assert sent["response_format"]["type"] == kind
    if kind == "json_schema":
        assert sent["response_format"]["json_schema"]["schema"] == json.loads(json.dumps(SCHEMA))
        assert sent["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize(
    ("code", "silence"),
    [
        (400, Silence.REJECTED),
        (401, Silence.UNAUTHORISED),
        (403, Silence.UNAUTHORISED),
        (404, Silence.REJECTED),
        (413, Silence.REJECTED),
        (422, Silence.REJECTED),
        (429, Silence.RATE_LIMITED),
        (500, Silence.SERVER_ERROR),
        (502, Silence.SERVER_ERROR),
        (503, Silence.SERVER_ERROR),
    ],
)
async def test_an_error_is_named_and_asked_only_once(code: int, silence: Silence) -> None:
    with serving(status(code, words="because of this")) as server:
        reply = await ChatEndpoint(section(server.url), ENVIRON).reply(an_ask(), SCHEMA, 20)
    assert (reply.silence, reply.retry_after_s) == (silence, None)
    assert f"HTTP {code}" in reply.detail and "because of this" in reply.detail
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7.0, 7.0),
        ("0.5", 0.5, 0.5),
        ("-3", 0.0, 0.0),
        # Two workers must collect the same tests, and the date of now differs between them.
        pytest.param(formatdate(usegmt=True), 0.0, 1.0, id="now"),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0, 0.0),
        ("soon", None, None),
        ("nan", None, None),
        ("inf", None, None),
    ],
)
async def test_retry_after_is_read_as_seconds_or_a_date(header: str, least: float | None, most: float | None) -> None:
    reply = await reply_to(status(429, Retry_After=header))
    assert reply.silence is Silence.RATE_LIMITED
    if least is None or most is None:
        assert reply.retry_after_s is None
    else:
        assert reply.retry_after_s is not None
        assert least <= reply.retry_after_s <= most


async def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        reply = await ChatEndpoint(section(url), ENVIRON).reply(an_ask(), SCHEMA, 20)
    assert reply.silence is Silence.UNREACHABLE


async def test_a_name_that_nobody_has() -> None:
    endpoint = ChatEndpoint(section("http://nowhere.invalid/v1"), ENVIRON)
    assert (await endpoint.reply(an_ask(), SCHEMA, 20)).silence in (Silence.UNREACHABLE, Silence.TIMEOUT)


async def test_an_endpoint_that_ends_the_connection_without_a_word() -> None:
    assert (await reply_to(drops)).silence is Silence.UNREACHABLE


@pytest.mark.parametrize(
    "move", [hangs, stalls(BODY, 0), stalls(BODY, 40), stalls(BODY, len(BODY) - 1)], ids=["hang", "0", "40", "last"]
)
async def test_silence_before_the_first_byte_or_in_the_middle_ends_with_the_time(move: Move) -> None:
    reply = await reply_to(move, within_s=SHORT_S)
    assert (reply.silence, reply.text) == (Silence.TIMEOUT, "")


@pytest.mark.parametrize("announced", [True, False], ids=["length promised", "length unknown"])
async def test_a_body_that_is_cut_at_any_byte_is_no_answer(announced: bool) -> None:
    with serving(*[cut(TINY, at, announced) for at in range(len(TINY))], sends(TINY)) as server:
        endpoint = ChatEndpoint(section(server.url), ENVIRON)
        replies = [await endpoint.reply(an_ask(), SCHEMA, 20) for _ in range(len(TINY))]
        whole = await endpoint.reply(an_ask(), SCHEMA, 20)
    assert (whole.silence, whole.text) == (None, "{}")
    assert {reply.silence for reply in replies} == {Silence.CUT}
    assert {reply.text for reply in replies} == {""}


async def test_an_answer_of_two_megabytes_is_not_read_to_its_end() -> None:
    assert (await reply_to(says("x" * 2_000_000))).silence is Silence.TOO_LONG
    assert len((await reply_to(says("x" * (LONGEST_BODY // 2)))).text) == LONGEST_BODY // 2


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"{}", b'{"choices": []}', b"\xff\xfe\xfd"])
async def test_status_200_with_something_else(body: bytes) -> None:
    assert (await reply_to(sends(body))).silence is Silence.NO_COMPLETION


@pytest.mark.parametrize(
    "move",
    [status(401, words=f"Incorrect API key provided: {KEY}"), says(f"your key is {KEY}")],
    ids=["error", "answer"],
)
async def test_an_endpoint_that_repeats_the_key_does_not_get_it_into_the_log(move: Move) -> None:
    reply = await reply_to(move)
    assert KEY not in reply.model_dump_json()
    assert "«key»" in reply.model_dump_json()


async def test_a_key_that_is_gone_is_a_silence_and_nothing_is_sent() -> None:
    with serving(says("hello")) as server:
        reply = await ChatEndpoint(section(server.url), {}).reply(an_ask(), SCHEMA, 20)
    assert (reply.silence, server.requests) == (Silence.UNAUTHORISED, [])
    assert "STUB_KEY" in reply.detail


async def test_a_key_from_a_file_and_no_key_at_all(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    with serving(says("hello")) as server:
        for fields in ({"api_key_env": None, "api_key_file": str(tmp_path / "key")}, {"api_key_env": None}):
            await ChatEndpoint(section(server.url, **fields), {}).reply(an_ask(), SCHEMA, 20)
    assert server.keys == ["Bearer from-a-file", "Bearer none"]
