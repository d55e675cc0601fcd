"""The pushed benchmark client against a real stub server over real sockets; no test asserts how long anything takes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from state.conditions import machine
from tests.e2e.witness import start_ticks
from tools.benches import builtin
from tools.benches import stream_client as sc

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tools" / "benches" / "stream_client.py"
DEMO_SERVER = ROOT / "tools" / "demo" / "llama_server.py"
STUB = ROOT / "benchmarks" / "stub_server.py"
TOKENS = 8


class Stub:
    """A running stub server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.pid = process.pid
        self.url = f"http://{process.stdout.readline().split()[1]}"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats") as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def stub_server(*flags: str) -> Iterator[Stub]:
    command = [sys.executable, str(STUB), "--keep-bodies", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Stub(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with stub_server() as running:
        yield running


class Client:
    """Runs the client as its users do: a process, a request file, a result file."""

    def __init__(self, folder: Path) -> None:
        self.asked, self.told, self.progress = (folder / f"{name}.json" for name in ("asked", "told", "progress"))

    def command(self, url: str, **changes: Any) -> list[str]:
        request = {
            "schema": 1,
            "run_id": "run-7",
            "base_url": url,
            "model": "stub",
            "concurrency": 4,
            "requests": 12,
            "prompt": {"kind": "random", "tokens": 16, "vocab_low": 100, "vocab_high": 30000},
            "output_tokens": TOKENS,
            "seed": 3,
            "request_deadline_s": 20,
            "run_deadline_s": 60,
            "sample_interval_s": 0.1,
            **changes,
        }
        self.asked.write_text(json.dumps(request))
        files = {"--request": self.asked, "--result": self.told, "--progress": self.progress}
        return [sys.executable, str(CLIENT), *(str(part) for pair in files.items() for part in pair)]

    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.told.read_text(), parse_constant=no_constant))

    def run(self, url: str, **changes: Any) -> dict[str, Any]:
        subprocess.run(self.command(url, **changes), check=True)
        return self.result()


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def fault(name: str, **where: Any) -> dict[str, Any]:
    return {"extra_body": {"stub": {"fault": name, **where}}}


def until(what: str, true: Callable[[], bool]) -> None:
    """Waits for something that must become true; gives up long after any machine would have got there."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail(f"never happened: {what}")


# --- an honest server ------------------------------------------------------------------------------------------------


def test_an_honest_run_is_counted_in_full(client: Client, stub: Stub) -> None:
    before = stub.stats()
    result = client.run(stub.url, warmup_requests=5, metrics_path="/metrics")
    after = stub.stats()
    assert (result["schema"], result["run_id"], result["error"], result["stopped_early"]) == (1, "run-7", None, None)
    assert (result["requested"], result["completed"], result["failed"], result["failures"]) == (12, 12, 0, {})
    assert (result["prompt_tokens"], result["output_tokens"], result["chunks"]) == (12 * 16, 12 * TOKENS, 12 * TOKENS)
    assert (result["short_outputs"], result["usage_mismatch"], result["cached_tokens"]) == (0, 0, None)
    assert result["warmup"] == {"requested": 5, "completed": 5, "failures": {}, "stopped_early": None}
    assert after["requests"] - before["requests"] == 17
    assert after["connections"] - before["connections"] == 17 + 3  # two looks at /metrics, one at /stats
    assert result["server_counters"] == {
        "llamacpp:prompt_tokens_cached_total": 0.0,
        "llamacpp:prompt_tokens_total": 12.0 * 16,
        "llamacpp:tokens_predicted_total": 12.0 * TOKENS,
    }


def test_the_figures_agree_with_each_other(client: Client, stub: Stub) -> None:
    result = client.run(stub.url)
    assert result["output_tok_s"] == pytest.approx(result["output_tokens"] / result["duration_s"], rel=1e-3)
    assert result["requests_s"] == pytest.approx(12 / result["duration_s"], rel=1e-3)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert len(result["requests"]) == 12
    for start_s, ttft_ms, e2e_ms, tokens, kind in result["requests"]:
        assert start_s >= 0 and 0 < ttft_ms <= e2e_ms and (tokens, kind) == (TOKENS, "ok")
    tpots = [(e2e_ms - ttft_ms) / (TOKENS - 1) for _, ttft_ms, e2e_ms, *_ in result["requests"]]
    assert result["tpot_ms"]["mean"] == pytest.approx(sum(tpots) / 12, abs=2e-3)
    progress = json.loads(client.progress.read_text())
    assert (progress["done"], progress["failed"], progress["of"]) == (12, 0, 12)


@pytest.mark.parametrize("processes", [1, 3])
def test_the_loop_is_closed_at_the_asked_concurrency(client: Client, processes: int) -> None:
    with stub_server("--rate", "400", "--streams", "7") as paced:
        result = client.run(paced.url, concurrency=7, requests=21, processes=processes)
        assert paced.stats()["peak_streams"] == 7
    assert (result["completed"], result["peak_concurrency"], result["client"]["processes"]) == (21, 7, processes)
    assert 6 < result["mean_concurrency"] <= 7


def test_prompts_follow_the_seed_and_never_repeat(client: Client, stub: Stub) -> None:
    def prompts(**changes: Any) -> list[tuple[int, ...]]:
        client.run(stub.url, requests=6, concurrency=1, **changes)
        return [tuple(body["prompt"]) for body in stub.stats()["bodies"][-6 - changes.get("warmup_requests", 0) :]]

    first = prompts(warmup_requests=4)
    assert len(set(first)) == 10 and all(len(ids) == 16 and min(ids) >= 100 and max(ids) < 30000 for ids in first)
    assert prompts() == first[4:]
    assert not set(prompts(seed=4)) & set(first)


def test_a_repetitive_prompt_repeats(client: Client, stub: Stub) -> None:
    prompt = {"kind": "repetitive", "tokens": 30, "vocab_low": 0, "vocab_high": 1000}
    client.run(stub.url, prompt=prompt)
    ids = stub.stats()["bodies"][-1]["prompt"]
    assert len(ids) == 30 and ids[:22] == ids[8:] and len(set(ids)) > 4


def test_the_body_asks_for_a_fixed_greedy_stream(client: Client, stub: Stub) -> None:
    client.run(stub.url, extra_body={"cache_prompt": False})
    body = stub.stats()["bodies"][-1]
    assert {
        key: body[key] for key in ("model", "max_tokens", "temperature", "stream", "ignore_eos", "cache_prompt")
    } == {
        "model": "stub",
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    assert body["stream_options"] == {"include_usage": True}


def test_a_name_with_a_dead_address_still_finds_the_server(client: Client, stub: Stub) -> None:
    result = client.run(stub.url.replace("127.0.0.1", "localhost"))
    assert (result["completed"], result["failures"]) == (12, {})


def test_the_key_is_sent_and_never_told(client: Client, stub: Stub, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cr3t-k3y\n")
    before = stub.stats()["authorized"]
    client.run(stub.url, api_key_file=str(tmp_path / "key"))
    assert stub.stats()["authorized"] - before == 12
    assert "s3cr3t" not in client.told.read_text() + client.progress.read_text()


# --- servers that lie, fail or fall silent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("zero_tokens", "no_tokens"),
        ("http_503", "http_status_503"),
        ("silent", "timeout"),
        ("garbage", "bad_stream"),
        ("garbage_framing", "bad_stream"),
        ("close_midstream", "connection_closed"),
        ("reset", "connection_closed"),
        ("error_body", "error_event"),
        ("error_event", "error_event"),
    ],
)
def test_one_bad_answer_is_one_failure_and_in_no_figure(client: Client, name: str, kind: str) -> None:
    with stub_server() as fresh:
        result = client.run(fresh.url, request_deadline_s=0.5, **fault(name, only=5))
    assert (result["completed"], result["failed"], result["failures"]) == (11, 1, {kind: 1})
    assert (result["output_tokens"], result["chunks"], result["stopped_early"]) == (11 * TOKENS, 11 * TOKENS, None)
    [bad] = [row for row in result["requests"] if row[4] != "ok"]
    assert (bad[1], bad[2], bad[4]) == (None, None, kind)
    slowest = max(row[2] for row in result["requests"] if row[2] is not None)
    assert result["e2e_ms"]["p99"] <= slowest + 1e-3


@pytest.mark.parametrize(
    ("name", "tokens", "chunks", "short", "mismatch", "missing"),
    [
        ("quarter_tokens", 2, 2, 12, 0, 0),
        ("lying_usage", 8, 2, 0, 12, 0),
        ("pairs", 8, 4, 0, 12, 0),
        ("no_usage", 8, 8, 0, 0, 12),
    ],
)
def test_both_token_counts_are_kept(
    client: Client, stub: Stub, name: str, tokens: int, chunks: int, short: int, mismatch: int, missing: int
) -> None:
    result = client.run(stub.url, **fault(name))
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["output_tokens"], result["chunks"]) == (12 * tokens, 12 * chunks)
    assert (result["short_outputs"], result["usage_mismatch"], result["usage_missing"]) == (short, mismatch, missing)


def test_a_share_of_refusals_is_told(client: Client) -> None:
    with stub_server() as fresh:
        result = client.run(fresh.url, requests=40, **fault("http_503", share=0.25))
    assert (result["completed"], result["failures"], result["not_started"]) == (30, {"http_status_503": 10}, 0)


def test_a_storm_of_errors_stops_the_run(client: Client, stub: Stub) -> None:
    result = client.run(stub.url, requests=500, **fault("http_503"))
    assert result["stopped_early"] == "error storm" and result["completed"] == 0
    assert result["not_started"] > 400
    assert result["output_tok_s"] is None and result["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_a_dead_server_is_noticed_in_the_warm_up(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    result = client.run(url, warmup_requests=3, metrics_path="/metrics")
    assert result["warmup"]["failures"] == {"connect_refused": 3}
    assert (result["stopped_early"], result["completed"], result["requests"]) == ("error storm", 0, [])
    assert "warm-up" in result["error"]
    result = client.run(url)
    assert set(result["failures"]) == {"connect_refused"} and result["server_counters"] is None


def test_the_run_deadline_ends_a_drip(client: Client, stub: Stub) -> None:
    result = client.run(stub.url, run_deadline_s=0.6, **fault("drip"))
    assert (result["stopped_early"], result["failures"], result["not_started"]) == (
        "run deadline",
        {"run_deadline": 4},
        8,
    )


def test_running_out_of_open_files_blames_the_client(client: Client, stub: Stub) -> None:
    command = client.command(stub.url, concurrency=64, requests=64, **fault("drip", share=0.0))
    subprocess.run(["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *command], check=True)
    result = client.result()
    assert result["client"]["nofile"] == 40 and result["client"]["nofile_low"]
    assert result["failures"]["client_no_socket"] > 0 and "no socket" in result["client"]["bottleneck_reason"]


# --- being stopped ---------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def dripping(client: Client, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A client in the middle of its measured window, with its worker and its sampler running."""
    with subprocess.Popen(client.command(url, processes=2, **fault("drip"))) as process:
        try:
            until(
                "two workers and a sampler at work",
                lambda: client.progress.exists() and len(children(process.pid)) == 3,
            )
            yield process
        finally:
            process.kill()


def gone(pids: list[int]) -> bool:
    return not any(sc.read_process(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_result_and_no_process(client: Client, stub: Stub, number: signal.Signals) -> None:
    with dripping(client, stub.url) as process:
        family = children(process.pid)
        process.send_signal(number)
        assert process.wait() == 143
    assert gone(family)
    result = client.result()
    assert (result["stopped_early"], result["failures"], result["completed"]) == ("terminated", {"stopped": 4}, 0)
    assert result["telemetry"] is not None


def test_a_killed_client_leaves_no_orphan(client: Client, stub: Stub) -> None:
    with dripping(client, stub.url) as process:
        family = children(process.pid)
        process.kill()
        process.wait()
        until("workers and sampler died with the client", lambda: gone(family))
    assert not client.told.exists()


def test_a_killed_worker_is_told(client: Client, stub: Stub) -> None:
    with dripping(client, stub.url) as process:
        sampler, *workers = sorted(children(process.pid))
        os.kill(workers[0], signal.SIGKILL)
        assert process.wait() == 0
    result = client.result()
    assert result["stopped_early"] == "client worker died" and f"client worker {workers[0]} died" in result["error"]
    assert gone([sampler, *workers])


# --- the fixed prompts -----------------------------------------------------------------------------------------------


def fixed(count: int = 3, **more: Any) -> dict[str, Any]:
    prompts = [{"id": f"p{number}", "text": f"Say {number}", "max_tokens": 4} for number in range(count)]
    return {"answers": {"prompts": prompts, **more}}


def test_fixed_prompts_are_asked_after_the_run_and_change_nothing_of_it(client: Client, stub: Stub) -> None:
    result = client.run(stub.url, metrics_path="/metrics", **fixed(at_once=8))
    assert (result["completed"], result["output_tokens"], result["error"]) == (12, 12 * TOKENS, None)
    assert result["server_counters"]["llamacpp:tokens_predicted_total"] == 12 * TOKENS
    told = result["answers"]
    assert (told["asked"], told["at_once"], told["error"]) == (3, 3, None)
    top = {" token": -0.25, " other": -1.75}
    assert told["given"] == [
        {
            "id": f"p{number}",
            "text": " token" * 4,
            "tokens": [" token"] * 4,
            "logprobs": [-0.25] * 4,
            "tops": [top] * 4,
        }
        for number in range(3)
    ]
    bodies = stub.stats()["bodies"][-3:]
    assert {body["prompt"] for body in bodies} == {"Say 0", "Say 1", "Say 2"}
    for body in bodies:
        asked = {key: value for key, value in body.items() if key != "prompt"}
        assert asked == {"max_tokens": 4, "temperature": 0, "seed": 1, "logprobs": 5, "model": "stub"}


def test_no_more_are_asked_at_once_than_the_run_had_in_flight(client: Client, stub: Stub) -> None:
    assert client.run(stub.url, concurrency=2, **fixed(at_once=3))["answers"]["at_once"] == 2


def test_without_fixed_prompts_there_are_no_answers(client: Client, stub: Stub) -> None:
    assert client.run(stub.url)["answers"] is None


def test_a_server_that_refuses_logprobs_is_asked_without(client: Client, stub: Stub) -> None:
    told = client.run(stub.url, **fixed(), **fault("no_logprobs"))["answers"]
    assert told["error"] is None
    assert told["given"] == [
        {"id": f"p{number}", "text": " token" * 4, "tokens": [], "logprobs": [], "tops": []} for number in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("error_body", "HTTP 200: "),
        ("silent", "no answer within 0.3 s"),
        ("reset", "ConnectionResetError"),
    ],
)
def test_an_answer_that_fails_is_told_and_spoils_nothing(client: Client, name: str, said: str) -> None:
    with stub_server() as fresh:  # the measured requests come first; of four questions the second fails
        result = client.run(fresh.url, concurrency=1, request_deadline_s=0.3, **fixed(4), **fault(name, only=14))
    assert (result["completed"], result["failed"], result["answers"]["error"]) == (12, 0, None)
    errors = [one.get("error") for one in result["answers"]["given"]]
    assert [error is None for error in errors] == [True, False, True, True]
    assert said in errors[1]


def test_the_run_deadline_holds_for_the_fixed_prompts(client: Client) -> None:
    with stub_server() as fresh:
        asked = {"concurrency": 1, "requests": 1, "run_deadline_s": 3.0, **fixed(4), **fault("silent", only=3)}
        result = client.run(fresh.url, **asked)
    assert (result["completed"], result["stopped_early"], result["error"]) == (1, None, None)
    assert result["answers"]["error"] == "run deadline"
    assert [one["id"] for one in result["answers"]["given"]] == ["p0"]


def test_a_signal_while_answers_are_awaited_leaves_the_measurement_whole(client: Client) -> None:
    with stub_server() as fresh:
        command = client.command(fresh.url, concurrency=1, **fixed(4), **fault("silent", only=14))
        with subprocess.Popen(command) as process:
            until("the silent request is under way", lambda: fresh.stats()["requests"] == 14)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 143
    result = client.result()
    assert (result["completed"], result["stopped_early"], result["error"]) == (12, None, None)
    assert result["answers"]["error"] == "terminated"


def test_a_run_that_ended_early_asks_no_more(client: Client, stub: Stub) -> None:
    result = client.run(stub.url, requests=100, **fixed(), **fault("http_503"))
    assert result["answers"] == {"error": "not asked: error storm"}


@contextlib.contextmanager
def demo_server(model: Path, log: Path, *more: str) -> Iterator[str]:
    """The demo's llama.cpp server on a free port; its base URL."""
    with demo_process(model, log, *more) as (url, _):
        yield url


@contextlib.contextmanager
def demo_process(model: Path, log: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same with its process, for a test that ends it."""
    flags = ["--port", "0", "--threads", "1", "--parallel", "2", "--ctx-size", "1024", "--fit", "off", *more]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, str(DEMO_SERVER), "--model", str(model), *flags], env=environment, stdout=sink, stderr=sink
        ) as process,
    ):
        try:
            until("the server listens", lambda: b"listening on http" in log.read_bytes() or process.poll() is not None)
            [url] = re.findall(r"listening on (http://\S+)", log.read_text())
            yield url, process
        finally:
            process.kill()


@pytest.mark.real
def test_a_real_server_answers_token_by_token(client: Client, demo_model: Path, tmp_path: Path) -> None:
    chat = "<|im_start|>user\nSay OK<|im_end|>\n<|im_start|>assistant\n"
    prompts = [
        {"id": "capital", "text": "The capital of France is", "max_tokens": 6},
        {"id": "chat", "text": chat, "max_tokens": 64},
    ]
    asked = {"model": None, "concurrency": 1, "requests": 1, "answers": {"prompts": prompts}}
    with demo_server(demo_model, tmp_path / "server.log") as url:
        first, second = (client.run(url, **asked)["answers"] for _ in range(2))
    assert first["error"] is None
    capital, chat_answer = first["given"]
    assert "Paris" in capital["text"] and len(capital["tokens"]) == 6
    for told in (capital, chat_answer):
        assert told["text"] == "".join(token for token in told["tokens"] if token != "#2")
        for token, logprob, top in zip(told["tokens"], told["logprobs"], told["tops"], strict=True):
            assert len(top) == 5 and top[token] == logprob == max(top.values()) <= 0
    assert chat_answer["tokens"][-1] == "#2", "the end mark has no text of its own"
    assert [one["tokens"] for one in second["given"]] == [one["tokens"] for one in first["given"]]


LLAMACPP_STEP = {
    "id": 7042,
    "token": " Paris",
    "bytes": [32, 80, 97, 114, 105, 115],
    "logprob": -0.2642531991004944,
    "top_logprobs": [
        {"id": 7042, "token": " Paris", "bytes": [32, 80, 97, 114, 105, 115], "logprob": -0.2642531991004944},
        {"id": 2, "token": "", "bytes": [], "logprob": -2.804166316986084},
    ],
}


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (
            {"text": " Paris", "logprobs": {"content": [LLAMACPP_STEP]}},
            {"tokens": [" Paris"], "logprobs": [-0.2643], "tops": [{" Paris": -0.2643, "#2": -2.8042}]},
        ),
        (  # a drafted token, and half of a character
            {
                "text": " a",
                "logprobs": {
                    "content": [
                        {"id": 5, "token": " a", "logprob": 0.0, "top_logprobs": []},
                        {"id": 6, "token": "\ufffd", "logprob": -1.0, "top_logprobs": []},
                    ]
                },
            },
            {"tokens": [" a", "#6"], "logprobs": [None, -1.0], "tops": [{}, {}]},
        ),
        (  # vLLM gives no alternatives for a first token without context, and a number that is none
            {
                "text": " a b",
                "logprobs": {
                    "tokens": [" a", " b"],
                    "token_logprobs": [None, float("nan")],
                    "top_logprobs": [None, {" b": -0.5, " c": float("-inf")}],
                },
            },
            {"tokens": [" a", " b"], "logprobs": [None, None], "tops": [{}, {" b": -0.5}]},
        ),
        ({"text": " a", "logprobs": None}, {"tokens": [], "logprobs": [], "tops": []}),
        ({"text": "", "finish_reason": "stop"}, {"tokens": [], "logprobs": [], "tops": []}),
    ],
)
def test_answers_are_read_in_both_forms(choice: dict[str, Any], read: dict[str, Any]) -> None:
    body = json.dumps({"choices": [choice]}).encode()
    assert sc.read_answer(body) == {"text": choice["text"], **read}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"text": null}]}',
        b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1]}}]}',
    ],
)
def test_what_is_no_completion_is_an_error(body: bytes) -> None:
    assert list(sc.read_answer(body)) == ["error"]


# --- a wrong request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"concurrency": 0}, "request.concurrency must be at least 1, got 0"),
        ({"requests": "many"}, "request.requests must be a JSON int"),
        ({"concurency": 4}, "unknown keys: concurency"),
        ({"schema": 2}, "request.schema must be 1"),
        ({"prompt": {"kind": "random"}}, "request.prompt.tokens is missing"),
        ({"base_url": "https://127.0.0.1:1"}, "must start with http://"),
        ({"endpoint": "/v1/chat/completions"}, "request.endpoint"),
        ({"extra_body": {"stream": False}}, "request.extra_body must not set"),
        ({"api_key_file": "/nowhere/key"}, "request.api_key_file cannot be read"),
        ({"request_deadline_s": float("inf")}, "request.request_deadline_s"),
        ({"answers": {"top": 5}}, "request.answers.prompts is missing"),
        ({"answers": {"prompts": [{"id": "a", "text": "b"}]}}, "request.answers.prompts[0].max_tokens is missing"),
        (
            {"answers": {"prompts": [{"id": "a", "text": "b", "max_tokens": 1}] * 2}},
            "request.answers.prompts must have ids that differ",
        ),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(client: Client, changes: dict[str, Any], named: str) -> None:
    done = subprocess.run(client.command("http://127.0.0.1:9", **changes), capture_output=True, text=True)
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1
    assert not client.told.exists()


# --- parts, on data --------------------------------------------------------------------------------------------------

EVENTS = (
    b'data: {"choices":[{"text":"a b","index":0}]}\n\n\n',
    b': ping\n\ndata: {"choices":[{"text":"c","finish_reason":null}]}\n',
    b'\ndata: {"choices":[{"text":"","finish_reason":"length"}],"usage":{"completion_tokens":2}}\r\n\r\nda',
    b"ta: [DONE]\n\n",
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;x=1\r\n%s\r\n" % (len(part), part) for part in EVENTS)
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("size", [*range(1, 40), 10_000])
def test_an_answer_reads_the_same_however_it_is_cut(size: int) -> None:
    said = sc.Transcript()
    for start in range(0, len(ANSWER), size):
        said.feed(ANSWER[start : start + size], float(start))
    assert (said.fault, said.kind(), len(said.stamps), said.usage) == ("", "ok", 2, {"completion_tokens": 2})


def test_an_answer_cut_short_is_never_ok() -> None:
    for end in range(ANSWER.index(b"[DONE]") + len(b"[DONE]")):
        said = sc.Transcript()
        said.feed(ANSWER[:end], 0.0)
        assert said.kind() == "connection_closed"


def test_percentiles_interpolate_between_order_statistics() -> None:
    assert sc.percentile([10.0, 20.0, 30.0, 40.0], 0.5) == 25.0
    assert sc.percentile([10.0, 20.0, 30.0, 40.0], 0.9) == pytest.approx(37.0)
    assert sc.percentile([], 0.5) is None
    assert sc.weighted_percentile([5.0, 1.0], [1, 99], 0.99) == 1.0


def test_counters_are_summed_over_labels_and_others_left_out() -> None:
    text = (
        '# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{engine="0"} 5\n'
        'vllm:prompt_tokens_total{engine="1",x="}"} 7.0\nvllm:num_requests_running 3\n'
        "llamacpp:prompt_tokens_total NaN\n"
    )
    assert sc.parse_counters(text) == {"vllm:prompt_tokens_total": 12.0}


def reading(at: float, user: int, server: int, client: int, start: int = 9) -> dict[str, Any]:
    ticks = {"server": server, "client": client, "exempt": 0}
    machine = {"at": at, "user": user, "iowait": 0, "irq": 0, "steal": 0, "loadavg1": 1.0, "mem_available_mb": 900.0}
    trees = {name: {"ticks": used, "pages": 256, "alive": 1} for name, used in ticks.items()}
    return {**machine, **trees, "server_start": start, "gpu": None, "gpu_error": "absent"}


def test_foreign_cpu_is_what_neither_the_server_nor_we_used() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    steps = [
        reading(float(t), t * 2 * hertz + foreign, t * hertz, t * hertz // 2)
        for t, foreign in ((0, 0), (1, 0), (2, hertz))
    ]
    told = sc.Telemetry(steps, 1.0).figures()
    assert told["foreign_cpu_cores"] == {"mean": 1.0, "max": 1.5}
    assert told["server_cpu_cores"] == {"mean": 1.0, "max": 1.0} and told["server_same_process"] is True
    assert told["series"]["foreign_cores"] == [0.5, 1.5] and (told["gpu"], told["gpu_error"]) == (None, None)


def test_without_the_same_server_foreign_cpu_is_unknown() -> None:
    told = sc.Telemetry([reading(0.0, 0, 0, 0), reading(1.0, 50, 0, 0, start=10)], 1.0).figures()
    assert told["server_same_process"] is False and told["foreign_cpu_cores"] == {"mean": None, "max": None}


def test_the_sampler_follows_the_server(client: Client) -> None:
    with stub_server("--rate", "40", "--streams", "4") as paced:
        told = client.run(paced.url, server_pid=paced.pid)["telemetry"]
    assert told["samples"] > 1 and told["server_same_process"] is True
    assert told["server_rss_mb_max"] > 1 and told["mem_available_mb_min"] > 1
    assert told["foreign_cpu_cores"]["mean"] is not None and len(told["series"]["t_s"]) > 1


def shim(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpu_readings_are_summarised(
    client: Client, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(
        tmp_path,
        monkeypatch,
        "echo '0, 501.5, 1980, 93, 70000, 61, 700.00, 0x0000000000000004';"
        " echo '1, [N/A], 1200, 0, 5, 40, 700.00, 0x0'",
    )
    with stub_server("--rate", "40", "--streams", "4") as paced:
        result = client.run(paced.url)
    boards = result["telemetry"]["gpu"]
    assert [board["index"] for board in boards] == ["0", "1"]
    assert boards[0]["power_w"] == {"mean": 501.5, "min": 501.5, "max": 501.5} and boards[1]["power_w"] is None
    assert boards[0]["power_limit_w"] == {"mean": 700.0, "min": 700.0, "max": 700.0}
    assert boards[0]["throttle_reasons"] == ["0x0000000000000004"]
    told = builtin.parse(json.dumps(result).encode(), "run-7").telemetry
    assert machine(told) == "2 GPUs, each 502 W of 700 W, 46 %, 1590 MHz, 68.4 GiB, 61 °C, slowed by power cap"


def test_a_hanging_nvidia_smi_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim(tmp_path, monkeypatch, "exec sleep 600")
    gpu = sc.Gpu(timeout_s=0.01)
    until("the query is given up", lambda: gpu.tick() is None and gpu.error is not None)
    assert gpu.error == "nvidia-smi gave no answer in 0.01 s"
    until("the killed query is gone", gpu.idle)


def test_a_run_ends_as_always_beside_a_hanging_nvidia_smi(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path, monkeypatch, f"echo $$ >{tmp_path}/pid; exec sleep 600")
    with stub_server("--rate", "40", "--streams", "4") as paced:
        result = client.run(paced.url)
    assert (result["completed"], result["telemetry"]["gpu"]) == (12, None)
    hanging = int((tmp_path / "pid").read_text())
    until("the query that hangs is gone", lambda: start_ticks(hanging) is None)


def test_a_counter_that_appears_with_its_first_count_began_at_zero() -> None:
    before = {"sglang:num_requests_total": 10.0}
    after = {"sglang:num_requests_total": 22.0, "sglang:num_retracted_requests_total": 3.0}
    told = {"sglang:num_requests_total": 12.0, "sglang:num_retracted_requests_total": 3.0}
    assert sc.counter_deltas(before, after) == told
    assert sc.counter_deltas(None, after) is sc.counter_deltas(before, None) is None


@pytest.mark.parametrize(
    ("worst", "itl_ms", "ttft_ms", "said"),
    [
        ({"cpu_share": 0.5, "wait_share": 0.1, "mean_lag_ms": 0.2, "p99_lag_ms": 2.0}, 10.0, 50.0, []),
        ({"cpu_share": 0.9}, 10.0, 50.0, ["used 90% of a core"]),
        ({"cpu_share": 0.5, "wait_share": 0.45}, 10.0, 50.0, ["waited for a core 45%"]),
        ({"cpu_share": 0.1, "mean_lag_ms": 3.0}, 10.0, 50.0, ["mean_lag_ms is 3.00, over a quarter of the ITL"]),
        ({"cpu_share": 0.1, "p99_lag_ms": 20.0}, 10.0, 50.0, ["p99_lag_ms is 20.00, over a quarter of the TTFT"]),
        ({"cpu_share": 0.1, "p99_lag_ms": 20.0}, None, None, []),
    ],
)
def test_the_client_says_when_it_is_the_limit(
    worst: dict[str, float | None], itl_ms: float | None, ttft_ms: float | None, said: list[str]
) -> None:
    reasons = sc.bottleneck_reasons(worst, itl_ms, ttft_ms)
    assert len(reasons) == len(said) and all(part in reason for part, reason in zip(said, reasons, strict=True))
