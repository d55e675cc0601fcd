"""An OpenAI-compatible endpoint on loopback that answers as a test tells it to, also wrongly, late or never."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Move = Callable[["Handler"], None]


def completion(content: str | None, finish: str | None = "stop", **message: object) -> bytes:
    """The body of a chat completion."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message}}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    told = {"id": "c", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice], "usage": usage}
    return json.dumps(told).encode()


def says(content: object, finish: str | None = "stop") -> Move:
    """A whole answer; anything but text is sent as its JSON."""
    return sends(completion(content if isinstance(content, str) else json.dumps(content), finish))


def sends(body: bytes) -> Move:
    """Status 200 and these bytes."""
    return lambda handler: handler.whole(200, body, {})


def status(code: int, words: str = "no", **headers: str) -> Move:
    """An error with the API's own kind of body."""
    body = json.dumps({"error": {"message": words, "type": "stub"}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.whole(code, body, named)


def cut(body: bytes, at: int, announced: bool) -> Move:
    """The first bytes of a body and then the end of the connection; `announced`: its whole length was promised."""
    return lambda handler: handler.part(body[:at], len(body) if announced else None)


def hangs(handler: Handler) -> None:
    """Takes the request and says nothing."""
    handler.server.over.wait()


def stalls(body: bytes, after: int) -> Move:
    """Begins an answer and does not go on."""

    def move(handler: Handler) -> None:
        handler.part(body[:after], len(body))
        handler.server.over.wait()

    return move


def drops(handler: Handler) -> None:
    """Ends the connection without a word."""


class Handler(BaseHTTPRequestHandler):
    """Notes each request and makes the next move."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.close_connection = True
        with self.server.taking:
            self.server.requests.append(sent)
            self.server.keys.append(self.headers.get("Authorization", ""))
            self.server.asked.set()
            place = min(len(self.server.requests), len(self.server.moves)) - 1
        with suppress(OSError):
            self.server.moves[place](self)

    def whole(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def part(self, body: bytes, length: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at `requests`."""


class Server(ThreadingHTTPServer):
    """The endpoint; the last move is made again and again."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *moves: Move) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.moves = moves
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.taking = threading.Lock()
        self.asked = threading.Event()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def said_to(self, request: int) -> list[str]:
        """The texts of one request's messages."""
        return [message["content"] for message in self.requests[request]["messages"]]


@contextmanager
def serving(*moves: Move) -> Iterator[Server]:
    """A running endpoint that makes these moves, one for each request."""
    with Server(*moves) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
