"""The host's HTTP probe and liveness, against small servers that answer well, badly, slowly or not at all."""

from __future__ import annotations

import ast
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from state.errors import CommandFailed
from tests.local_host import LocalHost
from tools.servers import http_probe
from tools.servers.base import HttpAnswer, HttpRequest
from tools.servers.completions import completion_tokens
from tools.servers.llamacpp import LlamaCpp
from tools.servers.probe import generates, http, judge, probe_source

Reply = Callable[["Handler"], None]
ADAPTER = LlamaCpp()
SHORT_S = 0.3


class Handler(BaseHTTPRequestHandler):
    """Lets the server's table of replies answer."""

    server: Server

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        self.server.replies.get(self.path, say(404, "{}"))(self)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


class Server(ThreadingHTTPServer):
    """`release` lets hanging replies go when a test is over."""

    daemon_threads = True

    def __init__(self, replies: Mapping[str, Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = replies
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that hangs up is what some tests are about."""


@contextmanager
def serving(replies: Mapping[str, Reply]) -> Iterator[Server]:
    server = Server(replies)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def say(status: int, text: str) -> Reply:
    def reply(handler: Handler) -> None:
        body = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def silent(handler: Handler) -> None:
    handler.server.release.wait(30)


def dripping(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.release.wait(0.05):
        handler.wfile.write(b" ")


def cut_short(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"half")


def hang_up(handler: Handler) -> None:
    """Closes the connection without a word."""


def counting(start: int, step: int) -> Reply:
    """A /metrics whose decode counter grows by `step` with every look."""
    looks = iter(range(start, 10**9, step) if step else [start] * 100)

    def reply(handler: Handler) -> None:
        say(200, f"# TYPE x counter\nllamacpp:n_decode_total {next(looks)}\n")(handler)

    return reply


COMPLETION = json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": 1, "prompt_tokens": 4}})
HEALTHY: dict[str, Reply] = {
    "/health": say(200, '{"status":"ok"}'),
    "/v1/models": say(200, '{"data":[{"id":"m"}]}'),
    "/slots": say(501, "{}"),
    "/props": say(200, '{"total_slots":1}'),
    "/metrics": counting(7, 0),
    "/v1/completions": say(200, COMPLETION),
}


@pytest.fixture
def host() -> LocalHost:
    return LocalHost()


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get(url: str, **fields: Any) -> HttpRequest:
    return HttpRequest(id="one", url=url, **fields)


def test_the_pushed_file_stands_alone() -> None:
    tree = ast.parse(probe_source())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)
    ast.parse(probe_source(), feature_version=(3, 7))


@pytest.mark.anyio
async def test_answers_come_in_order_with_what_was_asked(host: LocalHost) -> None:
    with serving({"/a?b=1": say(200, "ä"), "/post": say(201, "made")}) as server:
        requests = [
            HttpRequest(id="first", url=f"{server.url}/a?b=1"),
            HttpRequest(id="second", method="POST", url=f"{server.url}/post", body="ü", headers={"X-Y": "z"}),
            HttpRequest(id="third", url=f"{server.url}/nowhere"),
        ]
        answers = await http(host, sys.executable, requests)
    assert [(answer.id, answer.status, answer.text) for answer in answers] == [
        ("first", 200, "ä"),
        ("second", 201, "made"),
        ("third", 404, "{}"),
    ]
    assert [(command, path) for command, path, _ in server.seen][:2] == [("GET", "/a?b=1"), ("POST", "/post")]
    assert server.seen[1][2]["X-Y"] == "z" and server.seen[1][2]["Content-Length"] == "2"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "error"),
    [(silent, "timeout"), (dripping, "timeout"), (cut_short, "reset"), (hang_up, "reset")],
)
async def test_bad_servers_are_answers(host: LocalHost, reply: Reply, error: str) -> None:
    with serving({"/": reply}) as server:
        [answer] = await http(host, sys.executable, [get(f"{server.url}/", timeout_s=SHORT_S)])
    assert (answer.status, answer.error) == (None, error), answer


@pytest.mark.anyio
async def test_nobody_there_and_nonsense(host: LocalHost) -> None:
    with closing(socket.socket()) as mute:  # accepts in the kernel, never answers
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        urls = [f"http://127.0.0.1:{free_port()}/", "ftp://127.0.0.1/", f"http://127.0.0.1:{mute.getsockname()[1]}/"]
        answers = await http(host, sys.executable, [get(url, timeout_s=SHORT_S) for url in urls])
    assert [answer.error for answer in answers] == ["refused", "request", "timeout"]
    assert not any(answer.ok for answer in answers)


@pytest.mark.anyio
async def test_the_deadline_holds_for_all_together(host: LocalHost) -> None:
    with serving({"/": silent}) as server:
        requests = [get(f"{server.url}/", timeout_s=9) for _ in range(3)]
        answers = await http(host, sys.executable, requests, deadline_s=SHORT_S)
    assert [answer.error for answer in answers] == ["timeout", "deadline", "deadline"]


@pytest.mark.anyio
async def test_long_answers_are_cut(host: LocalHost) -> None:
    with serving({"/": say(200, "x" * (http_probe.MAX_TEXT_BYTES + 1))}) as server:
        [answer] = await http(host, sys.executable, [get(f"{server.url}/")])
    assert (answer.status, answer.cut, len(answer.text)) == (200, True, http_probe.MAX_TEXT_BYTES)


@pytest.mark.anyio
async def test_keys_come_from_a_file_on_the_host(host: LocalHost, tmp_path: Path) -> None:
    key, empty = tmp_path / "key", tmp_path / "empty"
    key.write_text("# comment\n\nabc\nsecond\n")
    empty.write_text("# nothing\n")
    files = [str(key), str(empty), str(tmp_path / "missing")]
    with serving({"/": say(200, "ok")}) as server:
        requests = [get(f"{server.url}/", api_key_file=file) for file in files]
        answers = await http(host, sys.executable, requests)
    assert [answer.error for answer in answers] == [None, "key-file", "key-file"]
    assert [headers["Authorization"] for _, _, headers in server.seen] == ["Bearer abc"]


@pytest.mark.anyio
async def test_a_probe_that_does_not_run_is_an_error(host: LocalHost, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="not found"):
        await http(host, str(tmp_path / "no-python"), [get("http://127.0.0.1:1/")])
    with pytest.raises(CommandFailed, match="something other than its answers"):
        await http(host, "/bin/echo", [get("http://127.0.0.1:1/")])


# --- liveness ----------------------------------------------------------------------------------------------

NO_TOKENS = json.dumps({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("replies", "state", "reason"),
    [
        ({}, "alive", "1 token"),
        ({"/health": say(503, "")}, "alive", "1 token"),
        ({"/v1/completions": silent}, "dead", "/health says 200, but no completion came"),
        ({"/v1/completions": silent, "/metrics": counting(7, 3)}, "busy", "n_decode_total moved"),
        ({"/v1/completions": silent, "/metrics": say(501, "{}")}, "dead", "shows no token counters"),
        ({"/v1/completions": say(503, '{"error":{"message":"Loading model"}}')}, "loading", "loaded"),
        ({"/v1/completions": say(503, "{}"), "/metrics": counting(7, 3)}, "busy", "moved"),
        ({"/v1/completions": say(503, "{}")}, "dead", "answered 503"),
        ({"/v1/completions": say(200, NO_TOKENS)}, "dead", "without a token"),
        ({"/v1/completions": say(200, '{"error":"boom"}')}, "dead", "without a token"),
        ({"/v1/completions": say(500, "boom"), "/metrics": counting(7, 3)}, "dead", "answered 500: 'boom'"),
        ({"/v1/completions": cut_short}, "dead", "reset"),
    ],
)
async def test_liveness_is_a_real_completion(
    host: LocalHost, replies: dict[str, Reply], state: str, reason: str
) -> None:
    with serving(HEALTHY | replies) as server:
        found = await generates(host, sys.executable, ADAPTER, server.url, timeout_s=SHORT_S)
    assert found.state == state, found
    assert reason in found.reason


@pytest.mark.anyio
async def test_a_port_where_nobody_listens_is_dead(host: LocalHost) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = await generates(host, sys.executable, ADAPTER, url, timeout_s=SHORT_S)
    assert (found.state, found.reason.partition(":")[0]) == ("dead", "refused")


@pytest.mark.parametrize(
    ("status", "text", "tokens"),
    [
        (200, COMPLETION, 1),
        (500, COMPLETION, 0),
        (200, NO_TOKENS, 0),
        (200, "", 0),
        (200, "[]", 0),
        (200, '{"choices": [], "usage": {"completion_tokens": 3}}', 0),
        (200, '{"choices": [{}], "usage": null}', 0),
    ],
)
def test_tokens_are_counted_by_the_usage(status: int, text: str, tokens: int) -> None:
    assert completion_tokens(HttpAnswer(id="generate", status=status, text=text)) == tokens


def test_a_restarted_counter_is_no_progress_of_a_refused_server() -> None:
    metrics = [HttpAnswer(id="metrics", status=200, text=f"llamacpp:n_decode_total {count}") for count in (9, 2)]
    refused = HttpAnswer(id="generate", error="refused", detail="ConnectionRefusedError")
    assert judge(ADAPTER, {"metrics": metrics[0]}, refused, {"metrics": metrics[1]}).state == "dead"
