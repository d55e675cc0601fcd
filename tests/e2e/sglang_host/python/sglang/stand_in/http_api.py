"""What the server answers: state, completions and, for its own bench client, a run whose figures are the scenario's.

Tokens of a completion come from a digest of its prompt, so the same prompt is always answered alike. A benchmark run
is one request that keeps the engine busy for a while and moves its counters; its figures are not measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.stand_in import log, witness
from sglang.stand_in.scenario import Scenario
from sglang.version import __version__

WARM_UP_S = 0.1
WORDS = [
    "the",
    "river",
    "ran",
    "under",
    "old",
    "stone",
    "bridges",
    "and",
    "every",
    "evening",
    "lamps",
    "were",
    "lit",
    "along",
    "its",
    "quiet",
    "banks",
    "for",
    "boats",
]
Flags = dict[str, str | bool | list[str]]


class Engine:
    """Counters, the gauge of running requests, and what a run would measure."""

    def __init__(self, scenario: Scenario, flags: Flags, in_force: list[str], launch: int, memory_mb: int) -> None:
        self.scenario, self.flags, self.in_force = scenario, flags, in_force
        self.launch, self.memory_mb = launch, memory_mb
        self.name = str(flags.get("--served-model-name", flags["--model-path"]))
        self.warm = False
        self.runs = 0
        self.running = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._lock = threading.Lock()

    def begin(self, requests: int) -> None:
        """So many requests more are running."""
        with self._lock:
            self.running += requests

    def done(self, requests: int, prompt_tokens: int, generated_tokens: int) -> None:
        """So many requests less, and what they were."""
        with self._lock:
            self.running -= requests
            self.prompt_tokens += prompt_tokens
            self.generated_tokens += generated_tokens

    def measure(self, load: dict[str, int]) -> float:
        """Be busy as if this load were served; output tokens per second that its client will tell."""
        concurrency, requests = load["concurrency"], load["requests"]
        self.runs += 1
        rate = self.scenario.output_tok_s(self.in_force, load, self.launch, self.runs)
        self.begin(concurrency)
        power = self.scenario.power_w(self.in_force)
        witness.show_gpus(power, self.memory_mb)
        log.decoded(concurrency, rate)
        time.sleep(self.scenario.seconds(self.in_force, concurrency))
        witness.show_gpus(None, self.memory_mb)
        self.done(concurrency, requests * load["prompt_tokens"], requests * load["output_tokens"])
        witness.note("run", launch=self.launch, run=self.runs, concurrency=concurrency, output_tok_s=rate)
        return rate


class Handler(BaseHTTPRequestHandler):
    """One exchange; what it knows stands on its server."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """The real one logs its requests; here they would only cost time."""

    def do_GET(self) -> None:
        """State."""
        engine, path = self.server.engine, self.path.rstrip("/")
        if path in ("/health", "/health_generate"):
            self._send(200 if engine.warm else 503, b"", "text/plain")
        elif path == "/v1/models":
            model = {"id": engine.name, "object": "model", "owned_by": "sglang", "root": engine.flags["--model-path"]}
            self._json({"object": "list", "data": [model]})
        elif path in ("/server_info", "/get_server_info"):
            self._json(self.server.info)
        elif path in ("/model_info", "/get_model_info"):
            self._json({"model_path": engine.flags["--model-path"], "is_generation": True})
        elif path == "/metrics" and "--enable-metrics" in engine.flags:
            self._send(200, metrics(engine).encode(), "text/plain; version=0.0.4")
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        """Work."""
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        if not self.server.engine.warm:
            self._send(503, b"", "text/plain")
        elif self.path == "/v1/completions":
            self._complete(asked)
        elif self.path == "/generate":
            self._generate(asked)
        elif self.path == "/stand_in/run":
            self._json({"output_tok_s": self.server.engine.measure(asked)})
        else:
            self._json({"detail": "Not Found"}, 404)

    def _complete(self, asked: dict[str, Any]) -> None:
        """OpenAI's older endpoint, whole or as a stream of one token an event."""
        prompt, most = asked.get("prompt", ""), int(asked.get("max_tokens", 16))
        tokens = list(answer(prompt, most))
        engine = self.server.engine
        engine.begin(1)
        usage = {"prompt_tokens": length(prompt), "completion_tokens": most, "total_tokens": length(prompt) + most}
        head = {"id": "cmpl-0", "object": "text_completion", "created": int(time.time()), "model": engine.name}
        if not asked.get("stream"):
            engine.done(1, length(prompt), most)
            choice = {"index": 0, "text": "".join(tokens), "finish_reason": "length"}
            choice["logprobs"] = logprobs(tokens) if asked.get("logprobs") else None
            self._json({**head, "choices": [choice], "usage": usage})
            return
        events = [{**head, "choices": [{"index": 0, "text": token, "finish_reason": None}]} for token in tokens]
        events.append({**head, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        events.append({**head, "choices": [], "usage": usage})
        engine.done(1, length(prompt), most)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, body.encode(), "text/event-stream")

    def _generate(self, asked: dict[str, Any]) -> None:
        """The engine's own endpoint."""
        prompt = asked.get("text", asked.get("input_ids", ""))
        most = int(asked.get("sampling_params", {}).get("max_new_tokens", 16))
        self.server.engine.begin(1)
        self.server.engine.done(1, length(prompt), most)
        told = {"prompt_tokens": length(prompt), "completion_tokens": most, "finish_reason": {"type": "length"}}
        self._json({"text": "".join(answer(prompt, most)), "meta_info": told})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """The listener with what its handlers know."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine, info: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", int(str(engine.flags.get("--port", "30000")))), Handler)
        self.engine, self.info = engine, resolved(info, engine)


def serve(engine: Engine, info: dict[str, Any]) -> None:
    """Listen, warm up, and serve until somebody ends the process."""
    server = Server(engine, info)
    log.listening(server.server_port)

    def warm_up() -> None:
        time.sleep(WARM_UP_S)
        engine.warm = True
        witness.note("ready", launch=engine.launch)
        log.ready()

    threading.Thread(target=warm_up, daemon=True).start()
    server.serve_forever()


def resolved(info: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """The recorded account of another server, with the arguments of this one."""
    state = info["internal_states"][0]
    for name, value in engine.flags.items():
        key = name.removeprefix("--").replace("-", "_")
        for place in (info, state):
            if key in place:
                place[key] = typed(value, place[key])
        phase = key.removeprefix("cuda_graph_backend_")
        if phase != key:
            info["cuda_graph_config"][phase]["backend"] = value
    if "fusion" not in engine.in_force:
        info["enable_flashinfer_allreduce_fusion"] = state["enable_flashinfer_allreduce_fusion"] = False
    running = engine.flags.get("--max-running-requests")
    state["effective_max_running_requests_per_dp"] = int(str(running or 2048))
    return {**info, "version": __version__}


def typed(value: str | bool | list[str], known: object) -> object:
    """A word of the command line as the server's own account has it."""
    if isinstance(value, bool) or isinstance(known, str):
        return value
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def length(prompt: object) -> int:
    """Tokens of a prompt: ids, or words."""
    return len(prompt) if isinstance(prompt, list) else len(str(prompt).split())


def answer(prompt: object, tokens: int) -> Iterator[str]:
    """As many tokens as asked, the same ones for the same prompt."""
    seed = hashlib.sha256(json.dumps(prompt).encode()).digest()
    for place in range(tokens):
        yield " " + WORDS[(seed[place % len(seed)] + place) % len(WORDS)]


def logprobs(tokens: list[str]) -> dict[str, Any]:
    """Parallel lists, as the older endpoint has them: each token was the likeliest, another one was far behind."""
    near, far = round(math.log(0.8), 4), round(math.log(0.05), 4)
    return {
        "tokens": tokens,
        "token_logprobs": [near] * len(tokens),
        "top_logprobs": [{token: near, " something": far, " else": far, ".": far, ",": far} for token in tokens],
    }


def metrics(engine: Engine) -> str:
    """The counters and gauges that a campaign looks at."""
    labels = f'{{engine_type="unified",model_name="{engine.name}"}}'
    shown = {
        "sglang:prompt_tokens_total": engine.prompt_tokens,
        "sglang:generation_tokens_total": engine.generated_tokens,
        "sglang:num_running_reqs": engine.running,
        "sglang:num_queue_reqs": 0,
        "sglang:token_usage": 0.1 if engine.running else 0.0,
        "sglang:cache_hit_rate": 0.0,
    }
    return "".join(f"{name}{labels} {float(value)}\n" for name, value in shown.items())
