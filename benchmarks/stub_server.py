"""A fast completions endpoint that only pretends to generate, for tests and for measuring clients; it must not judge,
and knows nothing of any client.

`python stub_server.py [--port N] [--rate CHUNKS_PER_S]` prints `listening HOST:PORT` and serves until it is killed.
`--rate` is the pace over all `--streams` together, 0 as fast as the sockets take it. A request chooses its own fault
with `"stub": {"fault": NAME, "share": 0..1, "only": K}`; flags of the same names set it for requests that do not.
Faults: zero_tokens, quarter_tokens, lying_usage (a quarter sent, all claimed), no_usage, pairs (two tokens a chunk),
http_503, silent, drip, garbage, garbage_framing, close_midstream, reset, error_body, error_event, no_logprobs (400).
Without `"stream": true` the answer comes whole, with logprobs in OpenAI's older form where asked.
`GET /metrics` has llama.cpp's counters, `GET /stats` what the stub saw; `/health` and `/v1/models` are answered, too.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

FAULTS = (
    "zero_tokens", "quarter_tokens", "lying_usage", "no_usage", "pairs", "http_503", "silent", "drip", "garbage",
    "garbage_framing", "close_midstream", "reset", "error_body", "error_event", "no_logprobs",
)  # fmt: skip
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
RETRY_S = 0.0005


def framed(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: dict[str, Any]) -> bytes:
    """One framed server-sent event."""
    return framed(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def text_event(text: str, finish: str | None = None) -> bytes:
    """A completion chunk the size that real servers send."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return event(
        {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "stub", "choices": [choice]}
    )


TOKEN = text_event(" token")
FINISH = text_event("", "length")
DONE = framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ERROR_EVENT = event({"error": {"message": "the stub was told to fail", "type": "server_error"}})


def plain(status: str, body: bytes, kind: str = "application/json") -> bytes:
    """A complete response with a known length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def usage_event(prompt: int, output: int) -> bytes:
    """The chunk that `stream_options.include_usage` asks for."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return event({"id": "cmpl-0123456789abcdef", "object": "text_completion", "choices": [], "usage": usage})


def script(prompt: int, asked: int, fault: str, told: bool) -> Iterator[bytes | None]:
    """The pieces of a streamed answer, one per pace; None stands for an abrupt end. `told`: usage was asked for."""
    sent = {"zero_tokens": 0, "quarter_tokens": asked // 4, "lying_usage": asked // 4, "pairs": asked // 2}.get(
        fault, asked
    )
    yield STREAM_HEAD
    for place in range(sent):
        if place == asked // 2 and fault in ("close_midstream", "garbage", "garbage_framing", "error_event"):
            yield from broken(fault)
            return
        yield TOKEN
    claimed = {"lying_usage": asked, "pairs": sent * 2}.get(fault, sent)
    usage = b"" if fault == "no_usage" or not told else usage_event(prompt, claimed)
    yield FINISH + usage + DONE


def broken(fault: str) -> Iterator[bytes | None]:
    """How a stream goes on once its fault has struck."""
    if fault == "garbage":
        yield framed(b"data: {\xff\xfe not json\n\n") + DONE
    elif fault == "garbage_framing":
        yield b"\x00\x01zz not a chunk size\r\n" + bytes(range(256))
    elif fault == "error_event":
        yield ERROR_EVENT + DONE
    yield None


def whole(body: dict[str, Any]) -> bytes:
    """A completion that is not streamed: as many tokens as asked, each with an alternative where logprobs are asked."""
    asked = body["max_tokens"]
    tokens = [" token"] * asked
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [-0.25] * asked,
        "top_logprobs": [{" token": -0.25, " other": -1.75}] * asked,
        "text_offset": [len(" token") * place for place in range(asked)],
    }
    choice = {
        "index": 0,
        "text": "".join(tokens),
        "logprobs": logprobs if body.get("logprobs") else None,
        "finish_reason": "length",
    }
    return plain("200 OK", json.dumps({"object": "text_completion", "choices": [choice]}).encode())


LOOKS = {b"/health": b"{}", b"/v1/models": b'{"object":"list","data":[{"id":"stub","object":"model"}]}'}


class Connection:
    """One accepted socket: what came in, what is to go out, when."""

    __slots__ = ("inbox", "interval_s", "pieces", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = b""
        self.pieces: Iterator[bytes | None] | None = None
        self.unsent = b""
        self.interval_s = 0.0

    def request(self) -> tuple[bytes, bytes] | None:
        """Head and body once both are complete."""
        head, mark, body = self.inbox.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        return (head, body) if mark and len(body) >= int(length or 0) else None


class Stub:
    """The server: one epoll set, a heap of streams by the time of their next chunk, and counts of what happened."""

    def __init__(self, listener: socket.socket, options: argparse.Namespace) -> None:
        self.listener, self.options = listener, options
        self.poll = select.epoll()
        self.poll.register(listener.fileno(), select.EPOLLIN)
        self.live: dict[int, Connection] = {}
        self.due: list[tuple[float, int, Connection]] = []
        self.order = 0
        self.bodies: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(
            ("connections", "requests", "authorized", "chunks", "finished", "blocked", "peak_streams"), 0
        )
        self.prompt_tokens = self.output_tokens = 0
        self.streaming = 0

    def serve(self) -> None:
        """Serves for ever."""
        while True:
            wait = 0.25 if not self.due else max(0.0, min(0.25, self.due[0][0] - time.monotonic()))
            for fd, _ in self.poll.poll(wait, 1024):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd in self.live:
                    self._read(self.live[fd])
            self._send_due()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.live[sock.fileno()] = Connection(sock)
                self.poll.register(sock.fileno(), select.EPOLLIN)
                self.counts["connections"] += 1

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.inbox += data
        request = connection.request() if connection.pieces is None else None
        if request:
            self._answer(connection, *request)

    def _answer(self, connection: Connection, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"GET" or not path.endswith(b"/completions"):
            connection.pieces = iter([self._look(path.partition(b"?")[0])])
        else:
            connection.pieces = self._complete(connection, head, json.loads(body))
        if connection.pieces is not None:
            self._schedule(connection, time.monotonic() + self.options.first_s * (connection.interval_s > 0))

    def _look(self, path: bytes) -> bytes:
        """The answer to whatever else clients ask, most of it of servers of one kind only."""
        if path == b"/metrics":
            return plain("200 OK", self._metrics(), "text/plain")
        if path == b"/stats":
            stats = {**self.counts, "streaming": self.streaming, "bodies": self.bodies[-64:]}
            return plain("200 OK", json.dumps(stats).encode())
        if path in LOOKS:
            return plain("200 OK", LOOKS[path])
        return plain("404 Not Found", b"{}")

    def _complete(self, connection: Connection, head: bytes, body: dict[str, Any]) -> Iterator[bytes | None] | None:
        number = self.counts["requests"] = self.counts["requests"] + 1
        self.counts["authorized"] += b"Authorization: Bearer " in head
        self.bodies = [*self.bodies[-63:], body] if self.options.keep_bodies else []
        fault = self._fault(body, number)
        if fault == "silent":
            return None
        if fault == "http_503":
            return iter([plain("503 Service Unavailable", b'{"error":{"message":"busy"}}')])
        if fault == "error_body":
            return iter([plain("200 OK", b'{"error":{"message":"the stub was told to fail"}}')])
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return iter([STREAM_HEAD + TOKEN, None])
        if fault == "no_logprobs" and body.get("logprobs"):
            return iter([plain("400 Bad Request", b'{"error":{"message":"no logprobs here"}}')])
        if not body.get("stream"):
            return iter([whole(body)])
        self.streaming += 1
        self.counts["peak_streams"] = max(self.counts["peak_streams"], self.streaming)
        rate = self.options.rate
        connection.interval_s = (
            self.options.drip_s if fault == "drip" else self.options.streams / rate if rate else 1e-9
        )
        self.prompt_tokens += len(body["prompt"])
        told = bool((body.get("stream_options") or {}).get("include_usage"))
        return script(len(body["prompt"]), body["max_tokens"], fault, told)

    def _fault(self, body: dict[str, Any], number: int) -> str:
        """The fault of the `number`-th request: spread evenly at `share`, or for the one request `only`."""
        wish = body.get("stub") or vars(self.options)
        share, only = wish.get("share", 1.0), wish.get("only")
        struck = number == only if only else int(number * share) > int((number - 1) * share)
        return (wish.get("fault") or "") if struck else ""

    def _metrics(self) -> bytes:
        lines = [
            f"llamacpp:prompt_tokens_total {self.prompt_tokens}",
            "llamacpp:prompt_tokens_cached_total 0",
            f"llamacpp:tokens_predicted_total {self.output_tokens}",
        ]
        return ("\n".join(lines) + "\n").encode()

    def _schedule(self, connection: Connection, at: float) -> None:
        self.order += 1
        heapq.heappush(self.due, (at, self.order, connection))

    def _send_due(self) -> None:
        now = time.monotonic()
        batch = []
        while self.due and self.due[0][0] <= now:
            batch.append(heapq.heappop(self.due))
        for at, _, connection in batch:
            if self.live.get(connection.sock.fileno()) is connection:
                self._send(connection, at)

    def _send(self, connection: Connection, at: float) -> None:
        piece = connection.unsent or next(connection.pieces or iter(()), None)
        if piece is None:
            self._close(connection)
            return
        try:
            sent = connection.sock.send(piece)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        connection.unsent = piece[sent:]
        if connection.unsent:
            self.counts["blocked"] += 1
            self._schedule(connection, time.monotonic() + RETRY_S)
            return
        if piece is TOKEN:
            self.counts["chunks"] += 1
            self.output_tokens += 1
        self._schedule(connection, at + connection.interval_s)

    def _close(self, connection: Connection) -> None:
        self.live.pop(connection.sock.fileno(), None)
        connection.sock.close()
        if connection.interval_s:
            self.streaming -= 1
            self.counts["finished"] += 1


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="A completions endpoint that only pretends to generate.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--rate", type=float, default=0.0, help="chunks per second over all streams; 0: unpaced")
    parser.add_argument("--streams", type=int, default=1, help="how many streams share the rate")
    parser.add_argument("--first-s", type=float, default=0.0, help="pause before the head of a stream")
    parser.add_argument("--drip-s", type=float, default=0.2, help="time between chunks of the fault `drip`")
    parser.add_argument("--processes", type=int, default=1, help="how many processes share the port")
    parser.add_argument("--keep-bodies", action="store_true", help="show the last 64 request bodies in /stats")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--share", type=float, default=1.0, help="share of the requests that the fault strikes")
    parser.add_argument("--only", type=int, help="the one request that the fault strikes, counted from 1")
    return parser.parse_args()


def main() -> None:
    """Listens, says where, serves until killed."""
    options = parse_options()
    listener = socket.create_server(("127.0.0.1", options.port), backlog=4096)
    listener.setblocking(False)
    print(f"listening 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    for _ in range(options.processes - 1):
        if os.fork() == 0:
            break
    with contextlib.suppress(KeyboardInterrupt):
        Stub(listener, options).serve()


if __name__ == "__main__":
    main()
