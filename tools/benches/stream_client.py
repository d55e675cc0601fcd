#!/usr/bin/env python3
"""A closed-loop streaming benchmark of a completions endpoint, pushed to a host as this one file; it must not import
anything but the standard library (Python 3.8 or later, Linux), judge a number, or leave a process behind.

`python3 stream_client.py --request REQ.json --result OUT.json [--progress FILE]`. Exit 0: a result was written,
whatever it says; 2: the request or an argument is wrong; 143: stopped by a signal, result written as far as it got.

How it measures
- One connection per request. `concurrency` requests are in flight until the tickets run out; warm-up comes first.
- A worker (one process per `processes`) only receives and stamps: `time.monotonic()` and the raw bytes of each read are
  kept, and read as HTTP, SSE and JSON when the window is over. Only answers below 4 KiB are read at once, to notice a
  server that fails everything.
- A request starts when its connection is begun. TTFT: start to the first content chunk. E2E: start to the end mark.
  TPOT = (E2E - TTFT) / (output tokens - 1). ITL: the gaps between consecutive content chunks, those of one read being 0
  apart; with speculation a chunk may carry several tokens. Percentiles interpolate linearly between order statistics.
- Output tokens are `usage.completion_tokens` where sent, else the content chunks. Only completed requests count in any
  latency or throughput. A figure without data is null.
- Where the request has `escort`, another program measures: it is started here after our own warm-up, sampled, ended at
  the deadline, and never believed; what is written then are the readings beside it. Fixed prompts follow as always.
- Where the request has `answers`, fixed prompts are asked once all of this has been taken. What comes of that is told
  beside the measurement and never changes it.
- The sampler is a process of its own, and counts the time of the measured window only. Foreign CPU is the user and
  system time of the whole machine less that of the server's, the exempted and our own process trees; interrupt time,
  which belongs to no process, is given beside it.
"""

from __future__ import annotations

import argparse
import array
import bisect
import collections
import contextlib
import ctypes
import errno
import gc
import hashlib
import http.client
import json
import math
import mmap
import os
import pickle
import platform
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

SCHEMA = 1
CONNECT_TIMEOUT_S = 10.0
TICK_S = 0.05
READ_BYTES = 65536
OPENINGS_PER_TURN = 8
SMALL_ANSWER_BYTES = 4096
LAST_WORDS_BYTES = 4096
LAST_CHUNK = b"0\r\n\r\n"
PATTERN_TOKENS = 8  # found on SmolLM2-135M with ids 1000 to 8000: it goes on repeating, and n-gram drafts are accepted
SERIES_POINTS = 120
ANSWERS_SEED = 1  # nothing is drawn at temperature 0; servers that want a seed get the same one each time
SHORTEST_WINDOW_S = 0.5  # below it the kernel's 10 ms ticks are all that a CPU share would show
STOPS = ("", "error storm", "run deadline", "terminated", "client worker died")
STORM, DEADLINE, TERMINATED, CRIPPLED = 1, 2, 3, 4
PERCENTILES = "linear interpolation between order statistics"
COUNTERS = frozenset(
    f"{engine}:{name}"
    for engine, names in {
        "llamacpp": "prompt_tokens_total prompt_tokens_cached_total tokens_predicted_total n_decode_total"
        " spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total",
        "vllm": "prompt_tokens_total prompt_tokens_cached_total generation_tokens_total request_success_total"
        " num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total",
        "sglang": "prompt_tokens_total cached_tokens_total generation_tokens_total num_requests_total"
        " num_aborted_requests_total num_retracted_requests_total evicted_tokens_total",
    }.items()
    for name in names.split()
)
GPU_FIELDS = {
    "index": "index",
    "power_w": "power.draw",
    "sm_mhz": "clocks.sm",
    "util_pct": "utilization.gpu",
    "memory_mb": "memory.used",
    "temperature_c": "temperature.gpu",
    "power_limit_w": "power.limit",
    "throttle": "clocks_throttle_reasons.active",
}
clock = time.monotonic


# --- the request -------------------------------------------------------------------------------------------------


class BadRequest(Exception):
    """The request file or an argument is wrong; nothing was sent to the server."""


class Field(NamedTuple):
    """What one key of the request must hold; `...` as default means it must be there."""

    kind: type
    default: Any = ...
    minimum: float = -math.inf
    nullable: bool = False


FIELDS = {
    "schema": Field(int, minimum=SCHEMA),
    "run_id": Field(str),
    "base_url": Field(str),
    "endpoint": Field(str, "/v1/completions"),
    "model": Field(str, None, nullable=True),
    "concurrency": Field(int, minimum=1),
    "requests": Field(int, minimum=1),
    "warmup_requests": Field(int, 0, 0),
    "prompt": Field(dict),
    "output_tokens": Field(int, minimum=1),
    "seed": Field(int),
    "request_deadline_s": Field(float, 600.0, 0.001),
    "run_deadline_s": Field(float, 3600.0, 0.001),
    "ignore_eos": Field(bool, True),
    "extra_body": Field(dict, {}),
    "api_key_file": Field(str, None, nullable=True),
    "server_pid": Field(int, None, 1, nullable=True),
    "sample_interval_s": Field(float, 1.0, 0.05),
    "metrics_path": Field(str, None, nullable=True),
    "processes": Field(int, 1, 1),
    "foreign_exempt_pids": Field(list, []),
    "answers": Field(dict, None, nullable=True),
    "escort": Field(dict, None, nullable=True),
}
PROMPT_FIELDS = {
    "kind": Field(str),
    "tokens": Field(int, minimum=1),
    "vocab_low": Field(int, minimum=0),
    "vocab_high": Field(int, minimum=1),
}
ANSWERS_FIELDS = {
    "prompts": Field(list),
    "top": Field(int, 5, 0),
    "at_once": Field(int, 4, 1),
}
ESCORT_FIELDS = {
    "command": Field(list),
    "environment": Field(dict, {}),
    "key_variables": Field(list, []),
    "printed": Field(str),
    "fresh": Field(list, []),
    "begin": Field(str, None, nullable=True),
    "end": Field(str, None, nullable=True),
}
FIXED_PROMPT_FIELDS = {
    "id": Field(str),
    "text": Field(str),
    "max_tokens": Field(int, minimum=1),
}


def checked(raw: Any, fields: dict[str, Field], where: str) -> dict[str, Any]:
    """`raw` with defaults filled in; raises BadRequest naming the first key that is missing, unknown or wrong."""
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be a JSON object, got {raw!r}")
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise BadRequest(f"{where} has unknown keys: {', '.join(unknown)}")
    return {
        name: checked_value(raw.get(name, field.default), field, f"{where}.{name}") for name, field in fields.items()
    }


def checked_value(value: Any, field: Field, where: str) -> Any:
    """`value` if it fits `field`, an int widened where a float is asked; raises BadRequest."""
    if value is ...:
        raise BadRequest(f"{where} is missing")
    if value is None and field.nullable:
        return None
    if field.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not field.kind:
        raise BadRequest(f"{where} must be a JSON {field.kind.__name__}, got {value!r}")
    if isinstance(value, (int, float)) and not field.minimum <= value < math.inf:
        raise BadRequest(f"{where} must be at least {field.minimum:g}, got {value!r}")
    return value


class Job:
    """The checked request and what follows from it: where to connect, and the bytes of each request."""

    def __init__(self, raw: Any) -> None:
        self.asked = checked(raw, FIELDS, "request")
        self.prompt = checked(self.asked["prompt"], PROMPT_FIELDS, "request.prompt")
        self.answers = self._fixed_prompts()
        escort = self.asked["escort"]
        self.escort = None if escort is None else checked(escort, ESCORT_FIELDS, "request.escort")
        self._check_meaning()
        self.concurrency: int = self.asked["concurrency"]
        self.processes: int = min(self.asked["processes"], self.concurrency)
        self.output_tokens: int = self.asked["output_tokens"]
        self.request_deadline_s: float = self.asked["request_deadline_s"]
        url = urlsplit(self.asked["base_url"])
        self.netloc, self.prefix = url.netloc, url.path.rstrip("/")
        self.family, self.address = self._resolve(url.hostname or "", url.port or 80)
        self.key = self._read_key()
        self._authorization = f"Authorization: Bearer {self.key}\r\n" if self.key else ""

    def _fixed_prompts(self) -> dict[str, Any] | None:
        if self.asked["answers"] is None:
            return None
        wanted = checked(self.asked["answers"], ANSWERS_FIELDS, "request.answers")
        where = "request.answers.prompts"
        prompts = [checked(p, FIXED_PROMPT_FIELDS, f"{where}[{i}]") for i, p in enumerate(wanted["prompts"])]
        if len({prompt["id"] for prompt in prompts}) < len(prompts):
            raise BadRequest(f"{where} must have ids that differ")
        return {**wanted, "prompts": prompts}

    def _check_meaning(self) -> None:
        asked, prompt = self.asked, self.prompt
        if asked["schema"] != SCHEMA:
            raise BadRequest(f"request.schema must be {SCHEMA}, got {asked['schema']}")
        if urlsplit(asked["base_url"]).scheme != "http":
            raise BadRequest(f"request.base_url must start with http://, got {asked['base_url']!r}")
        if not asked["endpoint"].startswith("/") or "chat" in asked["endpoint"]:
            raise BadRequest(
                f"request.endpoint must be a completions path (prompts are ids), got {asked['endpoint']!r}"
            )
        if prompt["kind"] not in ("random", "repetitive"):
            raise BadRequest(f"request.prompt.kind must be random or repetitive, got {prompt['kind']!r}")
        if prompt["vocab_high"] <= prompt["vocab_low"]:
            raise BadRequest("request.prompt.vocab_high must be above vocab_low (ids are low <= id < high)")
        fixed = sorted({"prompt", "stream", "stream_options", "max_tokens", "model"} & set(asked["extra_body"]))
        if fixed:
            raise BadRequest(f"request.extra_body must not set what the request itself decides: {', '.join(fixed)}")
        words = (self.escort or {}).get("command", ["-"])
        if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
            raise BadRequest(f"request.escort.command must be words, got {words!r}")
        if not all(type(pid) is int and pid > 0 for pid in asked["foreign_exempt_pids"]):
            raise BadRequest(f"request.foreign_exempt_pids must be pids, got {asked['foreign_exempt_pids']!r}")

    def _resolve(self, host: str, port: int) -> tuple[int, Any]:
        """The first address that accepts a connection, else the first: `localhost` is often two, one of them dead."""
        try:
            found = [(entry[0], entry[4]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except OSError as err:
            raise BadRequest(f"request.base_url: cannot resolve {host!r}: {err}") from err
        for family, address in found if len(found) > 1 else ():
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(2)
                if probe.connect_ex(address) == 0:
                    return family, address
        return found[0]

    def _read_key(self) -> str:
        path = self.asked["api_key_file"]
        if path is None:
            return ""
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, UnicodeError) as err:
            raise BadRequest(f"request.api_key_file cannot be read: {err}") from err

    def prompt_ids(self, phase: str, index: int) -> list[int]:
        """Token ids of one prompt: the same on every machine, different for each seed, phase and index."""
        seed = hashlib.sha256(f"{self.asked['seed']}:{phase}:{index}".encode()).digest()
        draw = random.Random(int.from_bytes(seed[:8], "big")).random
        low: int = self.prompt["vocab_low"]
        tokens: int = self.prompt["tokens"]
        span = self.prompt["vocab_high"] - low
        distinct = tokens if self.prompt["kind"] == "random" else min(tokens, PATTERN_TOKENS)
        ids = [low + int(draw() * span) for _ in range(distinct)]
        return (ids * (tokens // distinct + 1))[:tokens]

    def payload(self, phase: str, index: int) -> bytes:
        """The complete HTTP request of one ticket."""
        body = {
            "prompt": self.prompt_ids(phase, index),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": self.asked["ignore_eos"],
            **({} if self.asked["model"] is None else {"model": self.asked["model"]}),
            **self.asked["extra_body"],
        }
        return self._post(body, "text/event-stream")

    def question(self, prompt: dict[str, Any], top: int) -> bytes:
        """The complete HTTP request of one fixed prompt; `top` 0 asks for no logprobs."""
        body = {
            "prompt": prompt["text"],
            "max_tokens": prompt["max_tokens"],
            "temperature": 0,
            "seed": ANSWERS_SEED,
            **({"logprobs": top} if top else {}),
            **({} if self.asked["model"] is None else {"model": self.asked["model"]}),
            **self.asked["extra_body"],
        }
        return self._post(body, "application/json")

    def _post(self, body: dict[str, Any], accept: str) -> bytes:
        text = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {self.prefix}{self.asked['endpoint']} HTTP/1.1\r\nHost: {self.netloc}\r\n"
            f"Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            f"{self._authorization}Connection: close\r\n\r\n"
        )
        return head.encode("latin-1") + text

    def server_counters(self) -> dict[str, float] | None:
        """The server's own counters now, summed over labels; None where it offers none that we know."""
        if self.asked["metrics_path"] is None:
            return None
        try:
            link = http.client.HTTPConnection(self.netloc, timeout=5)
            with contextlib.closing(link):
                headers = dict([self._authorization.strip().split(": ", 1)] if self._authorization else [])
                link.request("GET", self.prefix + self.asked["metrics_path"], headers=headers)
                answer = link.getresponse()
                text = answer.read().decode("utf-8", "replace") if answer.status == 200 else ""
        except (OSError, http.client.HTTPException):
            return None
        return parse_counters(text) or None


def parse_counters(text: str) -> dict[str, float]:
    """The counters of COUNTERS in a Prometheus exposition, each summed over its label sets."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in COUNTERS:
            with contextlib.suppress(ValueError):
                value = float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
                if math.isfinite(value):
                    found[name] = found.get(name, 0.0) + value
    return found


# --- reading what was received -----------------------------------------------------------------------------------


class Head(NamedTuple):
    """The part of a response's head that decides how its body is read."""

    status: int
    chunked: bool
    length: int | None
    events: bool
    size: int


def parse_head(raw: bytes) -> Head | None:
    """The head at the start of `raw`, None while it is incomplete; raises ValueError when it is not HTTP."""
    head, mark, _ = raw.partition(b"\r\n\r\n")
    if not b"HTTP/1.".startswith(raw[:7]):
        raise ValueError(f"not an HTTP answer: {raw[:40]!r}")
    if not mark:
        if len(raw) > READ_BYTES:
            raise ValueError("the head of the answer does not end")
        return None
    first, *lines = head.decode("latin-1").lower().split("\r\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = fields.get("content-length")
    return Head(
        status=int(first.split()[1]),
        chunked="chunked" in fields.get("transfer-encoding", ""),
        length=None if length is None else int(length),
        events="text/event-stream" in fields.get("content-type", ""),
        size=len(head) + 4,
    )


class Transcript:
    """What one response said, read piece by piece; live until the last `feed`, never touching a socket."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.stamps: list[float] = []
        self.usage: dict[str, Any] = {}
        self.ended_at: float | None = None
        self.error = False
        self.fault = ""
        self.closed_tidily = False
        self._finish_seen = False
        self._wire = b""
        self._chunk_left = 0
        self._body = b""
        self._received = 0

    def feed(self, data: bytes, at: float) -> None:
        """Takes the next piece; what cannot be read is kept as a fault and ends the reading."""
        if self.fault:
            return
        try:
            self._feed(data, at)
        except (ValueError, TypeError, AttributeError, LookupError) as err:
            self.fault = f"{type(err).__name__}: {err}"

    def _feed(self, data: bytes, at: float) -> None:
        if self.head is None:
            self._wire += data
            self.head = parse_head(self._wire)
            if self.head is None:
                return
            data, self._wire = self._wire[self.head.size :], b""
        self._body += self._dechunk(data) if self.head.chunked else data
        self._received += len(data)
        if self.head.length is not None and self._received >= self.head.length:
            self.closed_tidily = True
        if self.head.events and self.head.status == 200:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._line(line.strip(), at)
        if self._finish_seen and self.closed_tidily and self.ended_at is None:
            self.ended_at = at

    def _dechunk(self, data: bytes) -> bytes:
        self._wire += data
        out = b""
        while self._wire and not self.closed_tidily:
            if self._chunk_left == 0:
                size, mark, rest = self._wire.partition(b"\r\n")
                if not mark and len(self._wire) < 64:
                    break
                count = int(size.partition(b";")[0], 16)
                if count < 0:
                    raise ValueError(f"chunk of size {count}")
                self.closed_tidily = count == 0
                self._chunk_left, self._wire = count + 2, rest
            taken = self._wire[: self._chunk_left]
            out += taken[: max(0, self._chunk_left - 2)]
            self._wire = self._wire[len(taken) :]
            self._chunk_left -= len(taken)
        return out

    def _line(self, line: bytes, at: float) -> None:
        name, colon, value = line.partition(b":")
        if not line or name in (b"", b"event", b"id", b"retry"):
            return
        if name == b"error":
            self.error = True
        elif not colon or name != b"data":
            raise ValueError(f"not a line of an event stream: {line[:60]!r}")
        elif value.strip() == b"[DONE]":
            self.ended_at = at
        else:
            self._event(json.loads(value), at)

    def _event(self, event: dict[str, Any], at: float) -> None:
        if event.get("error") or event.get("object") == "error":
            self.error = True
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            finished = choice.get("finish_reason") is not None
            self._finish_seen = self._finish_seen or finished
            if choice.get("text") or not finished:
                self.stamps.append(at)

    @property
    def body(self) -> bytes:
        """What came of a body that is not an event stream."""
        return self._body

    def kind(self) -> str:
        """`ok`, or the kind of failure that the response shows."""
        if self.fault:
            return "bad_stream"
        if self.head is None:
            return "connection_closed"
        if self.head.status != 200:
            return f"http_status_{self.head.status:03d}"
        if self.error or (not self.head.events and is_error_body(self._body)):
            return "error_event"
        if not self.head.events:
            return "bad_stream"
        if self.ended_at is None:
            return "connection_closed"
        return "ok" if self.stamps else "no_tokens"


def is_error_body(body: bytes) -> bool:
    """Whether a plain body is a JSON object that reports an error."""
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and bool(said.get("error") or said.get("object") == "error")


class Outcome(NamedTuple):
    """One request as it went. Seconds are of the monotonic clock; latencies and counts are None when not known."""

    ticket: int
    started_at: float
    ended_at: float
    kind: str
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    tokens: int = 0
    chunks: int = 0
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Report(NamedTuple):
    """What one worker tells: its share of the load, and what carrying it cost."""

    wall_s: float
    cpu_s: float
    wait_s: float | None
    reads: int
    lags_s: array.array[float]
    weights: array.array[int]
    connect_s: list[float]
    max_rss_mb: float
    outcomes: list[Outcome]
    gaps_ms: array.array[float]

    def cost(self) -> dict[str, float | None]:
        """Shares of the worker's time, and how long (ms) a chunk could lie unread, weighted by chunks."""
        wall, wait, turns = max(self.wall_s, 1e-9), self.wait_s, len(self.lags_s)
        mean_lag = weighted_mean(self.lags_s, self.weights)
        p99_lag = weighted_percentile(self.lags_s, self.weights, 0.99)
        return {
            "cpu_share": self.cpu_s / wall,
            "wait_share": None if wait is None else wait / wall,
            "wake_wait_ms": None if wait is None or not turns else wait / turns * 1e3,
            "mean_lag_ms": None if mean_lag is None else mean_lag * 1e3,
            "p99_lag_ms": None if p99_lag is None else p99_lag * 1e3,
            "max_lag_ms": max(self.lags_s) * 1e3 if turns else None,
            "max_rss_mb": self.max_rss_mb,
        }


def natural(value: Any) -> int | None:
    """`value` if it is a whole number from 0 up, else None."""
    return value if type(value) is int and value >= 0 else None


# --- the worker: sockets and stamps only -------------------------------------------------------------------------


class Board:
    """Numbers shared with the workers: a stop code and, for each worker, done, failed and tokens seen so far."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * (1 + 3 * workers))).cast("q")

    @property
    def stop(self) -> int:
        """0 while the run goes on, else an index into STOPS."""
        return self._cells[0]

    @stop.setter
    def stop(self, code: int) -> None:
        self._cells[0] = self._cells[0] or code

    def publish(self, slot: int, done: int, failed: int, tokens: int) -> None:
        """Sets the numbers of one worker; only that worker calls it."""
        base = 1 + 3 * slot
        self._cells[base], self._cells[base + 1], self._cells[base + 2] = done, failed, tokens

    def totals(self) -> tuple[int, int, int]:
        """Done, failed and tokens over all workers; `done` is provisional until the answers have been read."""
        cells = self._cells.tolist()
        return sum(cells[1::3]), sum(cells[2::3]), sum(cells[3::3])


class Stream:
    """One request in flight: its socket, what is still to be sent, and what came back when."""

    __slots__ = (
        "connected_at", "ended_at", "head", "index", "left", "pieces", "size", "sock", "started_at", "times", "unsent",
        "verdict",
    )  # fmt: skip

    def __init__(self, index: int, sock: socket.socket | None, payload: bytes) -> None:
        self.index = index
        self.sock = sock
        self.unsent: memoryview | None = memoryview(payload)
        self.started_at = clock()
        self.connected_at: float | None = None
        self.ended_at: float | None = None
        self.head: Head | None = None
        self.left: int | None = None
        self.size = 0
        self.pieces: list[bytes] = []
        self.times = array.array("d")
        self.verdict = ""

    def take_head(self) -> bool:
        """Looks for the head in what came so far; True when nothing useful can follow."""
        try:
            self.head = parse_head(b"".join(self.pieces))
        except (ValueError, LookupError):
            return True
        if self.head and self.head.length is not None and not self.head.chunked:
            self.left = self.head.size + self.head.length - self.size
        return self.complete(self.pieces[-1])

    def complete(self, data: bytes) -> bool:
        """Whether the response ends with `data`, by its own framing."""
        if self.left is not None:
            return self.left <= 0
        if len(data) < len(LAST_CHUNK):
            data = b"".join(self.pieces[-len(LAST_CHUNK) :])
        return self.head is not None and self.head.chunked and data.endswith(LAST_CHUNK)

    def transcript(self) -> Transcript:
        """Everything received, read."""
        transcript = Transcript()
        for data, at in zip(self.pieces, self.times):  # noqa: B905 - `strict` is newer than the oldest Python here
            transcript.feed(data, at)
        return transcript

    def outcome(self, gaps_ms: array.array[float]) -> Outcome:
        """The request as data; a completed one adds its inter-token gaps to `gaps_ms`."""
        said = self.transcript()
        end = said.ended_at or self.ended_at or clock()
        kind = self.verdict or said.kind()
        usage_tokens = natural(said.usage.get("completion_tokens"))
        tokens = len(said.stamps) if usage_tokens is None else usage_tokens
        plain = Outcome(self.index, self.started_at, self.ended_at or end, kind, tokens=tokens, chunks=len(said.stamps))
        if kind != "ok":
            return plain
        gaps_ms.extend((b - a) * 1e3 for a, b in zip(said.stamps, said.stamps[1:]))  # noqa: B905 - as above
        return plain._replace(
            ttft_ms=(said.stamps[0] - self.started_at) * 1e3,
            e2e_ms=(end - self.started_at) * 1e3,
            usage_tokens=usage_tokens,
            prompt_tokens=natural(said.usage.get("prompt_tokens")),
            cached_tokens=natural((said.usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
        )


class Worker:
    """One process's share of the streams, on one epoll set, from the release to the last answer."""

    def __init__(self, job: Job, slot: int, board: Board, tickets: int, payloads: list[bytes]) -> None:
        self.job, self.slot, self.board = job, slot, board
        self.tickets, self.payloads = tickets, payloads
        self.width = job.concurrency // job.processes + (slot < job.concurrency % job.processes)
        self.poll = select.epoll()
        self.live: dict[int, Stream] = {}
        self.by_age: collections.deque[Stream] = collections.deque()
        self.connecting: collections.deque[Stream] = collections.deque()
        self.finished: list[Stream] = []
        self.vacant = self.width
        self.dry = False
        self.done = self.failed = self.tokens = self.reads = 0
        self.lags = array.array("d")
        self.weights = array.array("l")
        self.next_check = 0.0
        self.parent = os.getppid()

    def run(self) -> tuple[float, float, float | None]:
        """Carries the share to its end; what it took in seconds of wall, CPU and run-queue wait."""
        wall, cpu, wait = clock(), time.process_time(), run_queue_wait_s()
        self._loop()
        waited = run_queue_wait_s()
        cost_s = None if wait is None or waited is None else waited - wait
        return clock() - wall, time.process_time() - cpu, cost_s

    def report(self, cost: tuple[float, float, float | None]) -> Report:
        """Reads everything received."""
        gaps_ms = array.array("d")
        outcomes = [stream.outcome(gaps_ms) for stream in self.finished]
        connect_s = [s.connected_at - s.started_at for s in self.finished if s.connected_at is not None]
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Report(*cost, self.reads, self.lags, self.weights, connect_s, rss_mb, outcomes, gaps_ms)

    def _loop(self) -> None:
        poll, live, receive = self.poll.poll, self.live, self._receive
        ready: list[tuple[int, int]] = []
        woke = clock()
        while True:
            if self.vacant:
                self._refill()
            if self.dry and not live:
                return
            if ready:
                self.lags.append(clock() - woke)
                self.weights.append(len(ready))
            ready = poll(0 if self.vacant and not self.dry else TICK_S, self.width)
            woke = clock()
            for fd, _ in ready:
                stream = live[fd]
                if stream.unsent is None:
                    receive(stream)
                else:
                    self._send(stream)
            if woke >= self.next_check:
                self._check(woke)

    def _refill(self) -> None:
        """Opens a few of the vacant streams: a whole wave at once would delay its own and all other chunks."""
        for _ in range(min(self.vacant, OPENINGS_PER_TURN)):
            # the offset is shared by all workers, and advanced atomically
            ticket = b"" if self.board.stop else os.read(self.tickets, 4)
            if not ticket:
                self.dry = True
                return
            self.vacant -= 1
            self._open(int.from_bytes(ticket, "little"))

    def _open(self, index: int) -> None:
        try:
            sock = socket.socket(self.job.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            self._finish(Stream(index, None, b""), "client_no_socket")
            return
        stream = Stream(index, sock, self.payloads[index])
        code = sock.connect_ex(self.job.address)
        if code not in (0, errno.EINPROGRESS):
            self._finish(stream, connect_failure(code))
            return
        self.live[sock.fileno()] = stream
        self.by_age.append(stream)
        self.connecting.append(stream)
        self.poll.register(sock.fileno(), select.EPOLLOUT)

    def _send(self, stream: Stream) -> None:
        sock, unsent = stream.sock, stream.unsent
        assert sock is not None and unsent is not None
        if stream.connected_at is None:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._finish(stream, connect_failure(code))
                return
            stream.connected_at = clock()
        try:
            unsent = unsent[sock.send(unsent) :]
        except BlockingIOError:
            return
        except OSError:
            unsent = unsent[:0]  # the server may have answered before it closed: reading will tell
        stream.unsent = unsent if len(unsent) else None
        if stream.unsent is None:
            self.poll.modify(sock.fileno(), select.EPOLLIN)

    def _receive(self, stream: Stream) -> None:
        try:
            data = stream.sock.recv(READ_BYTES)  # type: ignore[union-attr]  # a live stream has its socket
        except BlockingIOError:
            return
        except OSError:
            data = b""
        now = clock()
        if not data:
            self._finish(stream)
            return
        stream.pieces.append(data)
        stream.times.append(now)
        stream.size += len(data)
        self.reads += 1
        self.tokens += data.count(b"data: ")
        if stream.head is None:
            ended = stream.take_head()
        else:
            if stream.left is not None:
                stream.left -= len(data)
            ended = stream.complete(data)
        if ended:
            self._finish(stream)

    def _finish(self, stream: Stream, verdict: str = "") -> None:
        stream.ended_at = clock()
        stream.verdict = verdict
        if stream.sock is not None:
            self.live.pop(stream.sock.fileno(), None)
            stream.sock.close()
            stream.sock = None
        self.finished.append(stream)
        self.vacant += 1
        if verdict or not seems_good(stream):
            self.failed += 1
        else:
            self.done += 1
        self.board.publish(self.slot, self.done, self.failed, self.tokens)
        if is_storm(self.done, self.failed, self.width):
            self.board.stop = STORM

    def _check(self, now: float) -> None:
        self.next_check = now + TICK_S
        self.board.publish(self.slot, self.done, self.failed, self.tokens)
        expire(self.by_age, now - self.job.request_deadline_s, lambda stream: self._finish(stream, "timeout"))
        expire(self.connecting, now - CONNECT_TIMEOUT_S, self._give_up_connecting)
        if self.board.stop:
            verdict = "run_deadline" if self.board.stop == DEADLINE else "stopped"
            for stream in list(self.live.values()):
                self._finish(stream, verdict)
        if os.getppid() != self.parent:
            os._exit(1)

    def _give_up_connecting(self, stream: Stream) -> None:
        if stream.connected_at is None:
            self._finish(stream, "connect_timeout")


def expire(queue: collections.deque[Stream], before: float, act: Callable[[Stream], None]) -> None:
    """Takes the streams that started before a moment out of an age-ordered queue; `act` gets those still open."""
    while queue and (queue[0].ended_at is not None or queue[0].started_at < before):
        stream = queue.popleft()
        if stream.ended_at is None:
            act(stream)


def connect_failure(code: int) -> str:
    """The kind of failure behind an errno of connect()."""
    kinds = {
        errno.ECONNREFUSED: "connect_refused",
        errno.ETIMEDOUT: "connect_timeout",
        errno.EADDRNOTAVAIL: "client_no_socket",
        errno.EAGAIN: "client_no_socket",
    }
    return kinds.get(code, f"connect_{errno.errorcode.get(code, str(code)).lower()}")


def seems_good(stream: Stream) -> bool:
    """A cheap guess at success: short answers are read in full, long ones must have status 200 and their end mark."""
    if stream.size < SMALL_ANSWER_BYTES:
        return stream.transcript().kind() == "ok"
    tail = b"".join(stream.pieces[-3:])
    return stream.head is not None and stream.head.status == 200 and b"[DONE]" in tail and b'"error":' not in tail


def is_storm(done: int, failed: int, width: int) -> bool:
    """Whether going on is pointless: the first 2 x width all failed, or most of at least max(8, 2 x width) did."""
    total = done + failed
    return total >= 2 * width and (done == 0 or (total >= 8 and failed * 2 > total))


def run_queue_wait_s() -> float | None:
    """Seconds this process was runnable but not running, by the kernel's account; None where it keeps none."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


# --- the crew: one phase of load ---------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this child when its parent dies; exits at once if it already has."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def spawn(body: Callable[[], None]) -> int:
    """Forks a child that runs `body` and exits; signals meant for the run are the parent's to answer."""
    parent = os.getpid()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(parent)
        body()
        code = 0
    except BaseException:  # a forked child must never fall back into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def reap(pid: int, patience_s: float) -> int:
    """Waits for a child, kills it when patience is over; its wait status."""
    until = clock() + patience_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if clock() >= until:
            os.kill(pid, signal.SIGKILL)
            until = math.inf
        time.sleep(0.005)


class Crew:
    """The workers of one phase, all waiting at the same gate; live handle of their pids and pipes."""

    def __init__(self, job: Job, phase: str, requests: int) -> None:
        self.board = Board(job.processes)
        payloads = [job.payload(phase, index) for index in range(requests)]
        self._gate_read, self._gate = os.pipe()
        self.pids: dict[int, int] = {}
        with tempfile.TemporaryFile() as tickets:
            tickets.write(b"".join(index.to_bytes(4, "little") for index in range(requests)))
            tickets.seek(0)
            gc.collect()
            gc.freeze()
            for slot in range(job.processes):
                self._hire(job, slot, tickets.fileno(), payloads)

    def _hire(self, job: Job, slot: int, tickets: int, payloads: list[bytes]) -> None:
        inbox, outbox = os.pipe()

        def body() -> None:
            os.close(self._gate)
            gc.disable()
            serve(Worker(job, slot, self.board, tickets, payloads), self._gate_read, outbox)

        self.pids[inbox] = spawn(body)
        os.close(outbox)

    def open_gate(self) -> None:
        """Lets all waiting workers pass once: first to load, then to read what they received."""
        os.write(self._gate, b"g" * len(self.pids))

    def work(self, on_tick: Callable[[], None]) -> None:
        """Releases the workers and returns when each is done or dead; `on_tick` runs about each 50 ms."""
        self.open_gate()
        waiting = set(self.pids)
        while waiting:
            for fd in select.select(list(waiting), [], [], TICK_S)[0]:
                waiting.discard(fd)
                if os.read(fd, 1) != b"d":
                    self.board.stop = CRIPPLED
            on_tick()

    def reports(self) -> tuple[list[Report], str | None]:
        """Lets the workers read their answers; their reports, and what went wrong with a worker that has none."""
        with contextlib.suppress(OSError):
            self.open_gate()
        found: list[Report] = []
        trouble = None
        for fd, pid in self.pids.items():
            with open(fd, "rb") as file:
                data = file.read()
            status = reap(pid, 5)
            if status == 0:
                found.append(pickle.loads(data))
            else:
                trouble = f"client worker {pid} died (wait status {status}); its requests are missing"
        for fd in (self._gate, self._gate_read):
            os.close(fd)
        return found, trouble


def serve(worker: Worker, gate: int, outbox: int) -> None:
    """A worker's life: wait at the gate, load, say so, wait again, read the answers, report."""
    os.read(gate, 1)
    cost = worker.run()
    os.write(outbox, b"d")
    os.read(gate, 1)
    with open(outbox, "wb") as file:
        pickle.dump(worker.report(cost), file)


# --- the sampler -------------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """One line of /proc/PID/stat: ticks include those of reaped children."""

    parent: int
    ticks: int
    start: int
    pages: int


def read_process(pid: int) -> Process | None:
    """The process now; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return Process(int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]), int(fields[21]))
    except (OSError, IndexError):
        return None


class Trees:
    """The process trees under given roots; a full scan of /proc is repeated so rarely that it costs under 2 %."""

    def __init__(self, roots: dict[str, list[int]]) -> None:
        self._roots = roots
        self._members: dict[str, list[int]] = {}
        self._next_scan = 0.0

    def read(self) -> dict[str, dict[str, int]]:
        """For each named tree: CPU ticks and resident pages, summed over its processes."""
        if clock() >= self._next_scan:
            self._scan()
        return {name: self._sum(pids) for name, pids in self._members.items()}

    @staticmethod
    def _sum(pids: list[int]) -> dict[str, int]:
        alive = [process for process in map(read_process, pids) if process]
        return {"ticks": sum(p.ticks for p in alive), "pages": sum(p.pages for p in alive), "alive": len(alive)}

    def _scan(self) -> None:
        began = clock()
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            process = read_process(int(name)) if name.isdigit() else None
            if process:
                children.setdefault(process.parent, []).append(int(name))
        taken: set[int] = {pid for pids in self._roots.values() for pid in pids}
        self._members = {}
        for name, pids in self._roots.items():
            tree = list(pids)
            for pid in tree:  # grows while it is walked; a process belongs to the first tree that reaches it
                fresh = [child for child in children.get(pid, ()) if child not in taken]
                taken.update(fresh)
                tree += fresh
            self._members[name] = tree
        self._next_scan = clock() + 50 * (clock() - began)


class Gpu:
    """`nvidia-smi`, started and collected without ever waiting for it: on a sick driver it never returns."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        fields = ",".join(GPU_FIELDS.values())
        self._command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        self._timeout_s = timeout_s
        self._running: subprocess.Popen[bytes] | None = None
        self._killed: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self.error: str | None = None

    def tick(self) -> list[list[str]] | None:
        """The rows of the query that has finished since the last tick, if any; starts the next one."""
        rows = self._collect()
        if self._running is None and self.error is None:
            self._start()
        return rows

    def _start(self) -> None:
        try:
            self._began = clock()
            self._running = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            self.error = "absent"
        except OSError as err:
            self.error = f"nvidia-smi cannot run: {err}"

    def _collect(self) -> list[list[str]] | None:
        query = self._running
        if query is None:
            return None
        code = query.poll()
        if code is None:
            if clock() - self._began > self._timeout_s:
                self.error = f"nvidia-smi gave no answer in {self._timeout_s:g} s"
                self.stop()
            return None
        self._running = None
        assert query.stdout is not None
        with query.stdout as pipe:
            text = pipe.read().decode("utf-8", "replace")
        if code:
            self.error = f"nvidia-smi exited {code}: {text.strip()[-200:]}"
            return None
        return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]

    def stop(self) -> None:
        """Kills a query under way; does not wait, since a process stuck in the driver cannot die."""
        if self._running is not None and self._running.stdout is not None:
            self._running.kill()
            self._running.stdout.close()
            self._killed, self._running = self._running, None

    def idle(self) -> bool:
        """Whether no query is left, not even one that was killed."""
        return self._running is None and (self._killed is None or self._killed.poll() is not None)


class Probe:
    """Raw readings of the machine, each a plain dict; differences of two of them are rates."""

    def __init__(self, job: Job, client: int) -> None:
        server = job.asked["server_pid"]
        self._server: int | None = server
        self._trees = Trees(
            {
                "server": [] if server is None else [server],
                "client": [client],
                "exempt": job.asked["foreign_exempt_pids"],
            }
        )

    def read(self) -> dict[str, Any]:
        """CPU ticks by class and by tree, load average, free memory, at a monotonic time `at`."""
        at = clock()
        trees = self._trees.read()
        with open("/proc/stat", "rb") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        server = None if self._server is None else read_process(self._server)
        return {
            "at": at,
            "user": ticks[0] + ticks[1] + ticks[2],
            "iowait": ticks[4],
            "irq": ticks[5] + ticks[6],
            "steal": ticks[7],
            "loadavg1": os.getloadavg()[0],
            "mem_available_mb": mem_available_mb(),
            "server_start": None if server is None else server.start,
            **trees,
        }


def mem_available_mb() -> float | None:
    """MemAvailable of the machine in MiB."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1024
    return None


class Sampler:
    """The sampling process and the samples that came from it so far."""

    def __init__(self, job: Job) -> None:
        self._interval_s: float = job.asked["sample_interval_s"]
        self._inbox, outbox = os.pipe()
        leash_read, self._leash = os.pipe()
        client = os.getpid()

        def body() -> None:
            os.close(self._leash)
            sample_forever(Probe(job, client), self._interval_s, leash_read, outbox)

        self.pid = spawn(body)
        os.close(outbox)
        os.close(leash_read)
        os.set_blocking(self._inbox, False)
        self._raw = b""

    def drain(self) -> None:
        """Takes what the sampler has written; must be called now and then, or the sampler waits."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._inbox, READ_BYTES)
                if not data:
                    return
                self._raw += data

    def stop(self) -> list[dict[str, Any]]:
        """Ends the process; all samples it took."""
        self.drain()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._leash, b"x")  # not by closing it: the workers hold copies
        reap(self.pid, 1)
        os.close(self._leash)
        os.close(self._inbox)
        return [json.loads(line) for line in self._raw.split(b"\n")[:-1]]


def sample_forever(probe: Probe, interval_s: float, leash: int, outbox: int) -> None:
    """A JSON line per sample until the leash is pulled or the parent is gone."""
    gpu, parent = Gpu(), os.getppid()
    due = clock()
    with open(outbox, "w", encoding="ascii") as out:
        while True:
            out.write(json.dumps({**probe.read(), "gpu": gpu.tick(), "gpu_error": gpu.error}) + "\n")
            out.flush()
            due = max(due + interval_s, clock())
            if select.select([leash], [], [], max(0.0, due - clock()))[0] or os.getppid() != parent:
                gpu.stop()
                return


# --- figures -----------------------------------------------------------------------------------------------------


def rounded(value: float | None, digits: int = 3) -> float | None:
    """`value` rounded; None stays, and what is not finite becomes None."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def percentile(ordered: list[float], share: float) -> float | None:
    """The `share` quantile of sorted values, linear between order statistics; None without data."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, p50, p90 and p99; each None without data."""
    ordered = sorted(values)
    marks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    return {"mean": rounded(mean, 4), **{name: rounded(percentile(ordered, at), 4) for name, at in marks.items()}}


def weighted_percentile(values: Iterable[float], weights: Iterable[int], share: float) -> float | None:
    """The smallest value that covers `share` of the weight; None without data."""
    pairs = sorted(zip(values, weights))  # noqa: B905 - as above
    if not pairs:
        return None
    sums: list[int] = []
    for _, weight in pairs:
        sums.append(weight + (sums[-1] if sums else 0))
    return pairs[min(bisect.bisect_left(sums, share * sums[-1]), len(pairs) - 1)][0]


def most(values: Iterable[float | None]) -> float | None:
    """The greatest of those values that are known; None if none is."""
    return max((value for value in values if value is not None), default=None)


def weighted_mean(values: Iterable[float], weights: Iterable[int]) -> float | None:
    """The mean with weights; None without data."""
    pairs = list(zip(values, weights))  # noqa: B905 - as above
    return math.fsum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def concurrency(outcomes: list[Outcome], duration_s: float) -> tuple[int, float | None]:
    """Peak and mean number of requests in flight over the window, failed ones included."""
    moves = sorted([(o.started_at, 1) for o in outcomes] + [(o.ended_at, -1) for o in outcomes])
    peak = now = 0
    for _, step in moves:
        now += step
        peak = max(peak, now)
    busy = math.fsum(o.ended_at - o.started_at for o in outcomes)
    return peak, rounded(busy / duration_s) if duration_s > 0 else None


def client_figures(reports: list[Report], figures: dict[str, Any]) -> dict[str, Any]:
    """What the load cost the client, each figure that of its worst worker, and whether the client was the limit."""
    costs = [report.cost() for report in reports]
    names = list(costs[0]) if costs else []
    worst = {name: rounded(most(cost[name] for cost in costs)) for name in names}
    reads = sum(report.reads for report in reports)
    reasons = bottleneck_reasons(worst, figures["itl_ms"]["mean"], figures["ttft_ms"]["p50"])
    lost = figures["failures"].get("client_no_socket", 0)
    if lost:
        reasons.append(f"{lost} requests found no socket (open files or ports exhausted)")
    return {
        "processes": len(reports),
        **worst,
        "cpu_s": rounded(math.fsum(report.cpu_s for report in reports)),
        "reads": reads,
        "chunks_per_read": rounded(figures["chunks"] / reads) if reads else None,
        "connect_ms": summary(seconds * 1e3 for report in reports for seconds in report.connect_s),
        "python": platform.python_version(),
        "bottleneck": bool(reasons),
        "bottleneck_reason": "; ".join(reasons) or None,
    }


def bottleneck_reasons(
    worst: dict[str, float | None], itl_mean_ms: float | None, ttft_p50_ms: float | None
) -> list[str]:
    """Why the client, not the server, may have set the numbers.

    A worker is one thread: it is spent when little idle time is left, whether it runs (CPU share) or waits to be run on
    a full machine (run-queue wait). It distorts when the time for which a chunk may lie unread is a quarter of what is
    measured: the mean turn of the loop or the mean delayed wake-up against the mean ITL, the p99 turn, which is one
    that opens many connections, against the median TTFT.
    """
    cpu, wait = worst.get("cpu_share") or 0.0, worst.get("wait_share") or 0.0
    reasons = []
    if cpu > 0.8:
        reasons.append(f"a client worker used {cpu:.0%} of a core")
    elif cpu + wait > 0.9:
        reasons.append(f"a client worker ran {cpu:.0%} of the time and waited for a core {wait:.0%}")
    itl, ttft = ("ITL", itl_mean_ms), ("TTFT", ttft_p50_ms)
    for name, (what, measured_ms) in {"mean_lag_ms": itl, "wake_wait_ms": itl, "p99_lag_ms": ttft}.items():
        late_ms = worst.get(name)
        if measured_ms and late_ms and late_ms > 0.25 * measured_ms:
            reasons.append(f"{name} is {late_ms:.2f}, over a quarter of the {what} of {measured_ms:.2f} ms")
    return reasons


def totals(job: Job, outcomes: list[Outcome], gaps_ms: Iterable[float], duration_s: float) -> dict[str, Any]:
    """The figures that the judge reads, over completed requests only."""
    good = [o for o in outcomes if o.kind == "ok"]
    output, chunks = sum(o.tokens for o in good), sum(o.chunks for o in good)
    prompt = sum(job.prompt["tokens"] if o.prompt_tokens is None else o.prompt_tokens for o in good)
    cached = [o.cached_tokens for o in good if o.cached_tokens is not None]
    peak, mean = concurrency(outcomes, duration_s)

    def per_s(amount: int) -> float | None:
        return rounded(amount / duration_s) if good and duration_s > 0 else None

    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "failures": dict(collections.Counter(o.kind for o in outcomes if o.kind != "ok")),
        "not_started": job.asked["requests"] - len(outcomes),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(cached) if cached else None,
        "output_tok_s": per_s(output),
        "total_tok_s": per_s(output + prompt),
        "requests_s": per_s(len(good)),
        "ttft_ms": summary(o.ttft_ms for o in good if o.ttft_ms is not None),
        "tpot_ms": summary(
            (o.e2e_ms - o.ttft_ms) / (o.tokens - 1) for o in good if o.tokens > 1 and o.e2e_ms and o.ttft_ms
        ),
        "itl_ms": summary(gaps_ms),
        "e2e_ms": summary(o.e2e_ms for o in good if o.e2e_ms is not None),
        "percentile_method": PERCENTILES,
        "short_outputs": sum(o.tokens < job.output_tokens for o in good),
        "usage_mismatch": sum(o.usage_tokens is not None and o.usage_tokens != o.chunks for o in good),
        "usage_missing": sum(o.usage_tokens is None for o in good),
        "peak_concurrency": peak,
        "mean_concurrency": mean,
        "chunks": chunks,
        "chunks_s": per_s(chunks),
    }


class Telemetry:
    """The machine during the measured window, from raw readings taken at its start, through it, and at its end."""

    def __init__(self, readings: list[dict[str, Any]], interval_s: float) -> None:
        self._readings = readings
        self._interval_s = interval_s
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._steps = [
            self._rates(a, b) for a, b in self._neighbours() if b["at"] - a["at"] >= min(0.2, interval_s / 2)
        ]
        whole = self._rates(readings[0], readings[-1])
        enough = readings[-1]["at"] - readings[0]["at"] >= SHORTEST_WINDOW_S
        self._whole = whole if enough else dict.fromkeys(whole, None)

    def _neighbours(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self._readings, self._readings[1:])  # noqa: B905 - as above

    def _rates(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, float | None]:
        """Cores used between two readings, by class and tree."""
        scale = 1 / (self._hertz * max(b["at"] - a["at"], 1e-9))
        cores = {name: (b[name] - a[name]) * scale for name in ("user", "iowait", "irq", "steal")}
        trees = {name: max(0, b[name]["ticks"] - a[name]["ticks"]) * scale for name in ("server", "client", "exempt")}
        known = a["server_start"] is not None and a["server_start"] == b["server_start"]
        return {
            "at": b["at"],
            **cores,
            "client": trees["client"],
            "exempt": trees["exempt"],
            "server": trees["server"] if known else None,
            "foreign": max(0.0, cores["user"] - sum(trees.values())) if known else None,
        }

    def _cores(self, name: str) -> dict[str, float | None]:
        return {"mean": rounded(self._whole[name]), "max": rounded(most(step[name] for step in self._steps))}

    def figures(self) -> dict[str, Any]:
        """The summary; cores are CPU seconds per second; a tree's memory counts shared pages more than once."""
        page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20
        first, last = self._readings[0], self._readings[-1]
        rss = [r["server"]["pages"] * page_mb for r in self._readings if r["server"]["alive"]]
        memory = [r["mem_available_mb"] for r in self._readings if r["mem_available_mb"] is not None]
        same = None if first["server_start"] is None else first["server_start"] == last["server_start"]
        return {
            "samples": len(self._readings) - 2,
            "interval_s": self._interval_s,
            "window_s": rounded(last["at"] - first["at"]),
            "cores": os.cpu_count(),
            "cpu_busy_cores": self._cores("user"),
            "irq_cores": self._cores("irq"),
            "iowait_cores": self._cores("iowait"),
            "steal_cores": self._cores("steal"),
            "server_cpu_cores": self._cores("server"),
            "client_cpu_cores": self._cores("client"),
            "exempt_cpu_cores": self._cores("exempt"),
            "foreign_cpu_cores": self._cores("foreign"),
            "server_same_process": same,
            "loadavg1_max": max(r["loadavg1"] for r in self._readings),
            "mem_available_mb_min": rounded(min(memory, default=None), 1),
            "server_rss_mb_max": rounded(max(rss, default=None), 1),
            **self._gpu(),
            "series": self._series(page_mb),
        }

    def _gpu(self) -> dict[str, Any]:
        rows = [row for reading in self._readings for row in reading.get("gpu") or () if len(row) == len(GPU_FIELDS)]
        errors = [r["gpu_error"] for r in self._readings if r.get("gpu_error") not in (None, "absent")]
        boards = [
            gpu_figures(index, [row for row in rows if row[0] == index]) for index in sorted({row[0] for row in rows})
        ]
        return {"gpu": boards or None, "gpu_error": errors[-1] if errors else None}

    def _series(self, page_mb: float) -> dict[str, list[float | None]]:
        stride = max(1, math.ceil(len(self._steps) / SERIES_POINTS))
        began = self._readings[0]["at"]
        by_time = {reading["at"]: reading for reading in self._readings}
        series: dict[str, list[float | None]] = {"t_s": []}
        for step in self._steps[::stride]:
            series["t_s"].append(rounded((step["at"] or 0.0) - began))
            reading = by_time[step["at"]]
            for name in ("user", "server", "client", "foreign", "steal"):
                series.setdefault(f"{name}_cores", []).append(rounded(step[name]))
            series.setdefault("server_rss_mb", []).append(rounded(reading["server"]["pages"] * page_mb, 1))
            if any(r.get("gpu") for r in self._readings):
                watts = [gpu_number(row[1]) for row in reading.get("gpu") or () if len(row) == len(GPU_FIELDS)]
                known = [w for w in watts if w is not None]
                series.setdefault("gpu_power_w", []).append(rounded(math.fsum(known), 1) if known else None)
        return series


def gpu_number(cell: str) -> float | None:
    """A cell of nvidia-smi as a number; None for `[N/A]` and the like."""
    try:
        return rounded(float(cell))
    except ValueError:
        return None


def gpu_figures(index: str, rows: list[list[str]]) -> dict[str, Any]:
    """One board over the window: mean, least and most of each reading, and every throttle reason seen."""
    figures: dict[str, Any] = {"index": index}
    for place, name in enumerate(GPU_FIELDS):
        if name not in ("index", "throttle"):
            seen = [value for value in (gpu_number(row[place]) for row in rows) if value is not None]
            figures[name] = (
                {"mean": rounded(math.fsum(seen) / len(seen)), "min": min(seen), "max": max(seen)} if seen else None
            )
    return {**figures, "throttle_reasons": sorted({row[-1] for row in rows})}


def counter_deltas(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float] | None:
    """What the server counted in between, from 0 for what it had not counted yet; None if either side is missing."""
    if before is None or after is None:
        return None
    return {name: count - before.get(name, 0.0) for name, count in sorted(after.items())}


# --- the answers -------------------------------------------------------------------------------------------------


class CutOff(Exception):
    """Our own deadline passed before an answer was there, which says nothing about the server."""


class Asker:
    """Asks the fixed prompts, a few at a time, each once; live handle of the threads that do it.

    Threads are enough: nothing is measured any more. They are abandoned, not awaited, when the run must end.
    """

    def __init__(self, job: Job, wanted: dict[str, Any], deadline: float) -> None:
        self._job, self._top, self._deadline = job, wanted["top"], deadline
        self._prompts = wanted["prompts"]
        self._left = collections.deque(self._prompts)
        self._given: dict[str, dict[str, Any]] = {}
        self._error: str | None = None
        count = min(wanted["at_once"], job.concurrency, len(self._prompts))
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(count)]

    def ask(self, stopped: Callable[[], str | None]) -> dict[str, Any]:
        """The answers in the order of the prompts; `stopped` says why to end early."""
        began = clock()
        for thread in self._threads:
            thread.start()
        while self._error is None and any(thread.is_alive() for thread in self._threads):
            self._error = stopped()
            time.sleep(TICK_S)
        given = dict(self._given)
        return {
            "asked": len(self._prompts),
            "at_once": len(self._threads),
            "duration_s": rounded(clock() - began),
            "given": [given[prompt["id"]] for prompt in self._prompts if prompt["id"] in given],
            "error": self._error,
        }

    def _ask_on(self) -> None:
        try:
            while self._left and self._error is None:
                prompt = self._left.popleft()
                self._given[prompt["id"]] = {"id": prompt["id"], **self._answer(prompt)}
        except IndexError:
            return  # another thread took the last prompt
        except CutOff as cut:
            self._error = str(cut)
        except Exception as err:  # nothing may spoil the measurement, which is complete
            self._error = f"{type(err).__name__}: {err}"

    def _answer(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """What the server said; a server that refuses logprobs is asked again without them."""
        said = self._exchange(self._job.question(prompt, self._top))
        if self._top and said.head is not None and said.head.status != 200:
            said = self._exchange(self._job.question(prompt, 0))
        if said.fault or said.head is None:
            return {"error": said.fault or "connection closed without an answer"}
        if said.head.status != 200 or is_error_body(said.body):
            return {"error": f"HTTP {said.head.status}: {said.body[:200].decode('utf-8', 'replace')}"}
        return read_answer(said.body)

    def _exchange(self, payload: bytes) -> Transcript:
        """One request and all of its response, on a connection of its own."""
        said = Transcript()
        until = min(self._deadline, clock() + self._job.request_deadline_s)
        try:
            with socket.socket(self._job.family, socket.SOCK_STREAM) as sock:
                sock.settimeout(seconds_until(until))
                sock.connect(self._job.address)
                sock.sendall(payload)
                while not said.closed_tidily and not said.fault:
                    sock.settimeout(seconds_until(until))
                    data = sock.recv(READ_BYTES)
                    if not data:
                        break
                    said.feed(data, clock())
        except socket.timeout:  # noqa: UP041 - not yet TimeoutError in the oldest Python here
            if clock() >= self._deadline:
                raise CutOff(STOPS[DEADLINE]) from None
            said.fault = f"no answer within {self._job.request_deadline_s:g} s"
        except OSError as err:
            said.fault = f"{type(err).__name__}: {err}"
        return said


def seconds_until(moment: float) -> float:
    """Seconds left; raises socket.timeout when there are none."""
    left = moment - clock()
    if left <= 0:
        raise socket.timeout  # noqa: UP041 - as above
    return left


def read_answer(body: bytes) -> dict[str, Any]:
    """Text, tokens, logprobs and likeliest alternatives of a completion, in either of the forms that servers use.

    llama.cpp lists `content` with one object for each token; vLLM and SGLang give OpenAI's older parallel lists.
    """
    try:
        choice = json.loads(body)["choices"][0]
        text, told = choice["text"], choice.get("logprobs") or {}
        if not isinstance(text, str):
            raise TypeError(f"text is {text!r}")
        if told.get("content") is not None:
            steps = told["content"]
            tokens = [token_name(step) for step in steps]
            logprobs = [step.get("logprob") for step in steps]
            tops = [{token_name(top): top.get("logprob") for top in step.get("top_logprobs") or ()} for step in steps]
        else:
            tokens = [str(token) for token in told.get("tokens") or ()]
            logprobs = told.get("token_logprobs") or [None] * len(tokens)
            tops = [top or {} for top in told.get("top_logprobs") or [None] * len(tokens)]
        if not len(tokens) == len(logprobs) == len(tops):
            raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} logprobs and {len(tops)} alternatives")
        # a token that was drafted, not computed, comes with probability 1 and no alternatives
        sure = [bool(top) or value != 0 for value, top in zip(logprobs, tops)]  # noqa: B905 - as above
        return {
            "text": text,
            "tokens": tokens,
            "logprobs": [logprob(v) if known else None for v, known in zip(logprobs, sure)],  # noqa: B905 - as above
            "tops": [{name: logprob(v) for name, v in top.items() if logprob(v) is not None} for top in tops],
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as err:
        return {"error": f"not a completion ({type(err).__name__}: {err}): {body[:200].decode('utf-8', 'replace')}"}


def token_name(step: dict[str, Any]) -> str:
    """A token as text; by its id where it has no text of its own, as an end mark or a part of a character."""
    text = step.get("token")
    if isinstance(text, str) and text and "\ufffd" not in text:
        return text
    return f"#{step['id']}" if "id" in step else str(text)


def logprob(value: Any) -> float | None:
    """A logarithm of a probability, rounded; None for what is none."""
    return rounded(float(value), 4) if isinstance(value, (int, float)) else None


# --- the run -----------------------------------------------------------------------------------------------------


def write_atomically(path: str, text: str, durable: bool) -> None:
    """Replaces `path` in one step; `durable` also waits for the disk."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def raise_open_files(needed: int) -> dict[str, Any]:
    """Lifts the soft limit to the hard one; the limit, and whether it is below what the run needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    low = soft != resource.RLIM_INFINITY and soft < needed
    return {"nofile": None if soft == resource.RLIM_INFINITY else soft, "nofile_low": low}


class Bench:
    """One run from the first warm-up request to the result; live handle of the phase that is under way."""

    def __init__(self, job: Job, progress: str | None) -> None:
        self.job = job
        self._progress = progress
        self._began = clock()
        self._next_progress = 0.0
        self._board = Board(1)
        self._window_began: float | None = None
        self._terminated = False
        self._sampler: Sampler | None = None

    def terminate(self, *_: object) -> None:
        """The signal handler: the phase under way ends within a tick."""
        self._terminated = True

    def run(self) -> dict[str, Any]:
        """The whole result."""
        limits = raise_open_files(2 * self.job.concurrency + 64)
        warmup = self._warm_up()
        if warmup and warmup["stopped_early"]:
            return self._result(
                [], {}, limits, warmup, warmup["stopped_early"], "stopped in the warm-up: nothing measured"
            )
        self._sampler = Sampler(self.job)
        crew = self._crew("measured", self.job.asked["requests"])
        counters = self.job.server_counters()
        probe = Probe(self.job, os.getpid())
        first = probe.read()
        started_unix, self._window_began = time.time(), clock()
        crew.work(self._tick)
        last = probe.read()
        self._write_progress(clock())
        samples = [s for s in self._sampler.stop() if first["at"] < s["at"] < last["at"]]
        counters = counter_deltas(counters, self.job.server_counters())
        stopped = STOPS[crew.board.stop] or None
        reports, trouble = crew.reports()
        measured = {
            "started_at_unix": rounded(started_unix),
            "telemetry": Telemetry([first, *samples, last], self.job.asked["sample_interval_s"]).figures(),
            "server_counters": counters,
        }
        result = self._result(reports, measured, limits, warmup, stopped, trouble)
        refusal = result["stopped_early"] or (None if result["completed"] else "no request was completed")
        return {**result, "answers": self._answers(refusal)}

    def _answers(self, refusal: str | None) -> dict[str, Any] | None:
        """The fixed prompts and what was said to them; None where none were wanted."""
        if self.job.answers is None:
            return None
        if refusal:
            return {"error": f"not asked: {refusal}"}
        try:
            asker = Asker(self.job, self.job.answers, self._began + self.job.asked["run_deadline_s"])
            return asker.ask(lambda: STOPS[TERMINATED] if self._terminated else None)
        except Exception as err:  # the measurement is complete, whatever happens here
            return {"error": f"{type(err).__name__}: {err}"}

    def _crew(self, phase: str, requests: int) -> Crew:
        crew = Crew(self.job, phase, requests)
        self._board = crew.board
        return crew

    def _warm_up(self) -> dict[str, Any] | None:
        requests = self.job.asked["warmup_requests"]
        if not requests:
            return None
        crew = self._crew("warmup", requests)
        crew.work(self._tick)
        stopped = STOPS[crew.board.stop] or None
        outcomes = [outcome for report in crew.reports()[0] for outcome in report.outcomes]
        failures = collections.Counter(o.kind for o in outcomes if o.kind != "ok")
        if outcomes and sum(failures.values()) == len(outcomes):
            stopped = stopped or STOPS[STORM]
        done = len(outcomes) - sum(failures.values())
        return {"requested": requests, "completed": done, "failures": dict(failures), "stopped_early": stopped}

    def _tick(self) -> None:
        now = clock()
        if self._terminated:
            self._board.stop = TERMINATED
        elif now - self._began > self.job.asked["run_deadline_s"]:
            self._board.stop = DEADLINE
        if self._sampler is not None:
            self._sampler.drain()
        if now >= self._next_progress:
            self._next_progress = now + 1.0
            self._write_progress(now)

    def _write_progress(self, now: float) -> None:
        if self._progress and self._window_began is not None:
            done, failed, tokens = self._board.totals()
            line = {
                "done": done,
                "failed": failed,
                "of": self.job.asked["requests"],
                "elapsed_s": rounded(now - self._window_began),
                "output_tokens": tokens,
            }
            write_atomically(self._progress, json.dumps(line) + "\n", durable=False)

    def _result(
        self,
        reports: list[Report],
        measured: dict[str, Any],
        limits: dict[str, Any],
        warmup: dict[str, Any] | None,
        stopped: str | None,
        error: str | None,
    ) -> dict[str, Any]:
        outcomes = sorted(outcome for report in reports for outcome in report.outcomes)
        gaps = [gap for report in reports for gap in report.gaps_ms]
        began = min((o.started_at for o in outcomes), default=0.0)
        duration_s = max((o.ended_at for o in outcomes), default=0.0) - began
        figures = totals(self.job, outcomes, gaps, duration_s)
        return {
            "schema": SCHEMA,
            "run_id": self.job.asked["run_id"],
            "request": self.job.asked,
            "started_at_unix": None,
            "duration_s": rounded(duration_s, 6) if outcomes else None,
            "requested": self.job.asked["requests"],
            **figures,
            "warmup": warmup,
            "client": {**client_figures(reports, figures), **limits},
            "telemetry": None,
            "server_counters": None,
            **measured,
            "stopped_early": stopped,
            "requests": [request_row(outcome, began) for outcome in outcomes],
            "answers": None,
            "error": error,
        }


class Escort:
    """Another program's run in our folder: its output goes to a file, its whole group ends with it; a live handle.

    It is read only for two marks, which tell when the program begins and ends what it measures.
    """

    def __init__(self, job: Job, wanted: dict[str, Any]) -> None:
        stale = [name for name in (wanted["printed"], *wanted["fresh"]) if os.path.exists(name)]
        if stale:
            raise FileExistsError(f"left from an earlier run: {', '.join(stale)}")
        environment = {**os.environ, **wanted["environment"], "PYTHONUNBUFFERED": "1"}
        environment.update(dict.fromkeys(wanted["key_variables"] if job.key else (), job.key))
        parent = os.getpid()
        self._printed = open(wanted["printed"], "w+b")  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            wanted["command"],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        self._marks = {name: wanted[name].encode() for name in ("begin", "end") if wanted[name]}
        self._unread = b""
        self._place = 0
        self._kill_at: float | None = None

    def seen(self) -> set[str]:
        """The marks that have come since the last look."""
        while fresh := os.pread(self._printed.fileno(), READ_BYTES, self._place):
            self._place += len(fresh)
            self._unread += fresh
        found = {name for name, mark in self._marks.items() if mark in self._unread}
        self._unread = self._unread[-max((len(mark) for mark in self._marks.values()), default=1) :]
        for name in found:
            del self._marks[name]
        return found

    def ended(self) -> bool:
        """Whether the program is over."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Asks the program's group to end; what is left 5 s later is killed. To be called again until it has ended."""
        number = signal.SIGTERM if self._kill_at is None else signal.SIGKILL
        if self._kill_at is None or clock() >= self._kill_at:
            self._kill_at = clock() + 5.0
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self) -> int:
        """Leaves nothing of the group behind; exit code of the program, negative for a signal.

        The last words of one that failed are said again, to whoever reads our own errors.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code:
            size = os.fstat(self._printed.fileno()).st_size
            last = os.pread(self._printed.fileno(), LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
            sys.stderr.write(last.decode("utf-8", "replace"))
        self._printed.close()
        return code


class EscortedBench(Bench):
    """A run that another program makes: our warm-up, its run with our readings beside it, our fixed prompts."""

    def run(self) -> dict[str, Any]:
        """The readings; what the program found stands in its own files."""
        limits = raise_open_files(2 * self.job.concurrency + 256)
        warmup = self._warm_up()
        stopped: str | None = warmup["stopped_early"] if warmup else None
        watched = {} if stopped else self._escorted()
        stopped = stopped or watched.pop("stopped_early")
        refusal = stopped or watched.get("error") or (f"exit code {watched['exit']}" if watched.get("exit") else None)
        return {
            "schema": SCHEMA,
            "run_id": self.job.asked["run_id"],
            "request": self.job.asked,
            "warmup": warmup,
            "limits": limits,
            "exit": None,
            "telemetry": None,
            "counters": None,
            "error": None,
            **watched,
            "stopped_early": stopped,
            "answers": self._answers(refusal),
        }

    def _escorted(self) -> dict[str, Any]:
        assert self.job.escort is not None
        counters = {"before": self.job.server_counters()}
        self._sampler = Sampler(self.job)
        probe = Probe(self.job, os.getpid())
        readings = {"start": probe.read()}
        began_unix = time.time()
        try:
            escort = Escort(self.job, self.job.escort)
        except OSError as err:
            self._sampler.stop()
            return {"error": f"the client could not be started: {err}", "stopped_early": None}
        stopped: str | None = None
        while not escort.ended():
            self._tick()
            for mark in escort.seen():
                readings[mark] = probe.read()
                if mark == "begin":
                    counters[mark] = self.job.server_counters()
            if self._board.stop:
                stopped = STOPS[self._board.stop]
                escort.stop()
            time.sleep(TICK_S)
        if "begin" in readings:
            readings.update(dict.fromkeys(escort.seen(), probe.read()))
        readings["over"] = probe.read()
        code = escort.end()
        counters["after"] = self.job.server_counters()
        first, last = readings.get("begin", readings["start"]), readings.get("end", readings["over"])
        samples = [s for s in self._sampler.stop() if first["at"] < s["at"] < last["at"]]
        return {
            "started_at_unix": rounded(began_unix),
            "wall_s": rounded(readings["over"]["at"] - readings["start"]["at"]),
            "marks": sorted(set(readings) & {"begin", "end"}),
            "exit": code,
            "telemetry": Telemetry([first, *samples, last], self.job.asked["sample_interval_s"]).figures(),
            "counters": counters,
            "stopped_early": stopped,
        }


def request_row(o: Outcome, began: float) -> list[Any]:
    """`[start_s, ttft_ms, e2e_ms, output_tokens, kind]`; a failed request has no latencies."""
    return [rounded(o.started_at - began, 6), rounded(o.ttft_ms), rounded(o.e2e_ms), o.tokens, o.kind]


def load_job(path: str, result: str) -> Job:
    """The job in a request file; raises BadRequest for anything that would make the run pointless."""
    folder = os.path.dirname(os.path.abspath(result))
    if not os.access(folder, os.W_OK):
        raise BadRequest(f"--result {result}: its folder cannot be written")
    try:
        with open(path, encoding="utf-8") as file:
            return Job(json.load(file))
    except (OSError, ValueError) as err:
        raise BadRequest(f"--request {path}: {err}") from err


def main() -> NoReturn:
    """The command line."""
    parser = argparse.ArgumentParser(description="Closed-loop streaming benchmark of a completions endpoint.")
    parser.add_argument("--request", required=True, help="JSON file that says what to send")
    parser.add_argument("--result", required=True, help="JSON file to write when the run is over")
    parser.add_argument("--progress", help="JSON file rewritten about once a second in the measured window")
    args = parser.parse_args()
    try:
        job = load_job(args.request, args.result)
    except BadRequest as err:
        print(f"stream_client: {err}", file=sys.stderr)
        sys.exit(2)
    bench = Bench(job, args.progress) if job.escort is None else EscortedBench(job, None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, bench.terminate)
    result = bench.run()
    write_atomically(args.result, json.dumps(result, allow_nan=False, separators=(",", ":")) + "\n", durable=True)
    ends = (result["stopped_early"], (result["answers"] or {}).get("error"))
    sys.exit(143 if STOPS[TERMINATED] in ends else 0)


if __name__ == "__main__":
    main()
