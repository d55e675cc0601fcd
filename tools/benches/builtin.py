"""The built-in streaming client as a bench adapter: request out, Metrics in; it runs nothing itself.

The client is one standard-library file that is pushed to the host (`stream_client.py`) and run there as a job.
"""

from __future__ import annotations

import functools
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from state.errors import CommandFailed
from state.models import Answer, Metrics, Summary, Telemetry
from tools.benches.base import COUNTED, PREEMPTED, PROGRESS, REQUEST, REQUESTS_COUNTED, RESULT, Place
from tools.target import RunRequest, RunResult

SAMPLE_INTERVAL_S = 0.5
TOP = 5
"""How many alternatives are asked at each step: the most that the legacy completions API allows."""
AT_ONCE = 4


class Builtin:
    """Our own client as one of the seam."""

    name = "builtin"
    leaves = (RESULT,)
    progress: str | None = PROGRESS
    lacks = ("prompts of text: it sends token ids", "https", "the chat endpoint")

    def script(self, key: str, request: RunRequest, at: Place) -> str:
        """See `BenchClient.script`."""
        return script(at.python, at.client, request_json(key, request, at.url, at.model, at.api_key_file))

    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`; it comes with us."""
        return ()

    def parse(self, files: Mapping[str, bytes], key: str) -> RunResult:
        """See `BenchClient.parse`."""
        return parse(files.get(RESULT, b""), key)

    def again(self, raw: Mapping[str, Any], key: str) -> RunResult:
        """See `BenchClient.again`."""
        return parse(json.dumps(raw).encode(), key)


def source() -> bytes:
    """The client, to be put on the host."""
    return Path(__file__).with_name("stream_client.py").read_bytes()


@functools.cache
def fixed_prompts() -> tuple[dict[str, Any], ...]:
    """The prompts that tell whether a server still answers as before: `id`, `text`, `max_tokens`."""
    return tuple(tomllib.loads(Path(__file__).with_name("answers.toml").read_text(encoding="utf-8"))["prompts"])


def request_json(
    key: str, request: RunRequest, base_url: str, model: str | None, api_key_file: str | None
) -> dict[str, Any]:
    """What the client is asked to do. Token ids are drawn on the host from the seed, so arms see equal prompts."""
    point, workload = request.point, request.workload
    return {
        "schema": 1,
        "run_id": key,
        "base_url": base_url,
        "endpoint": workload.endpoint,
        "model": model,
        "concurrency": point.concurrency,
        "requests": point.requests,
        "warmup_requests": point.warmup_requests,
        "prompt": {
            "kind": point.prompt,
            "tokens": point.prompt_tokens,
            "vocab_low": workload.vocab_low,
            "vocab_high": workload.vocab_high,
        },
        "output_tokens": point.output_tokens,
        "seed": request.seed,
        "request_deadline_s": workload.request_deadline_s,
        "run_deadline_s": workload.run_deadline_s,
        "ignore_eos": True,
        "api_key_file": api_key_file,
        "server_pid": request.process.pid,
        "sample_interval_s": SAMPLE_INTERVAL_S,
        "metrics_path": "/metrics",
        "answers": {"prompts": fixed_prompts(), "top": TOP, "at_once": AT_ONCE} if request.answers else None,
    }


def script(python: str, client: str, asked: dict[str, Any]) -> str:
    """Sh that leaves the request beside the job's other files and becomes the client; the job's folder is its cwd."""
    words = [python, client, "--request", REQUEST, "--result", RESULT, "--progress", PROGRESS]
    part = f"{REQUEST}.part"
    stored = f"printf %s {shlex.quote(json.dumps(asked))} >{part} && mv -f {part} {REQUEST} || exit 1"
    return f"{stored}\nexec {shlex.join(words)}\n"


def parse(text: bytes, key: str) -> RunResult:
    """The client's result as the one Measurement shape. Raises CommandFailed for another run's or a broken file."""
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["run_id"] != key:
            raise ValueError(f"it belongs to run {raw['run_id']}")
        answers = read_answers(raw.pop("answers", None))
        return RunResult(metrics=_metrics(raw), telemetry=read_telemetry(raw), answers=answers, raw=raw)
    except (ValueError, KeyError, TypeError) as wrong:
        raise CommandFailed(
            f"the client's result cannot be used: {wrong}",
            where={"run": key},
            tail=text[-2000:].decode("utf-8", "replace"),
            do="look at the job's folder on the host",
        ) from wrong


def _metrics(raw: dict[str, Any]) -> Metrics:
    client = raw["client"]
    return Metrics(
        requested=raw["requested"],
        completed=raw["completed"],
        failed=raw["failed"],
        failures=raw["failures"],
        short_outputs=raw["short_outputs"],
        duration_s=raw["duration_s"] or 0.0,
        prompt_tokens=raw["prompt_tokens"],
        output_tokens=raw["output_tokens"],
        cached_tokens=raw["cached_tokens"],
        output_tok_s=raw["output_tok_s"],
        total_tok_s=raw["total_tok_s"],
        requests_s=raw["requests_s"],
        ttft_ms=Summary(**raw["ttft_ms"]),
        tpot_ms=Summary(**raw["tpot_ms"]),
        itl_ms=Summary(**raw["itl_ms"]),
        e2e_ms=Summary(**raw["e2e_ms"]),
        peak_concurrency=raw["peak_concurrency"],
        mean_concurrency=raw["mean_concurrency"],
        client_bottleneck=client.get("bottleneck_reason"),
        stopped_early=raw["stopped_early"] or raw["error"],
        server_output_tokens=counted(raw.get("server_counters")),
        server_requests=counted(raw.get("server_counters"), REQUESTS_COUNTED),
    )


def read_answers(told: dict[str, Any] | None) -> tuple[Answer, ...]:
    """What was said to the fixed prompts that were asked."""
    given = (told or {}).get("given", ())
    return tuple(
        Answer(
            prompt=one["id"],
            text=one.get("text", ""),
            tokens=one.get("tokens", ()),
            logprobs=one.get("logprobs", ()),
            tops=one.get("tops", ()),
            error=one.get("error"),
        )
        for one in given
    )


def counted(counters: Mapping[str, float] | None, names: Sequence[str] = COUNTED) -> int | None:
    """What the server's own counters tell, by default its output tokens; None where it has none that we know."""
    for name in names:
        if counters and name in counters:
            return int(counters[name])
    return None


def read_telemetry(raw: dict[str, Any]) -> Telemetry:
    """What the sampler beside the client saw, and what the server counted in the measured window."""
    counts = raw.get("server_counters")
    seen = raw.get("telemetry") or {}
    foreign, steal = seen.get("foreign_cpu_cores") or {}, seen.get("steal_cores") or {}
    mean_steal = steal.get("mean")
    return Telemetry(
        foreign_cpu_cores=foreign.get("mean"),
        foreign_cpu_cores_max=foreign.get("max"),
        steal_share=None if mean_steal is None else mean_steal / seen["cores"],
        server_cpu_cores=(seen.get("server_cpu_cores") or {}).get("mean"),
        client_cpu_share=raw["client"].get("cpu_share"),
        mem_available_mb=seen.get("mem_available_mb_min"),
        server_rss_mb=seen.get("server_rss_mb_max"),
        gpu=seen.get("gpu"),
        preemptions=counted(counts, PREEMPTED),
    )
