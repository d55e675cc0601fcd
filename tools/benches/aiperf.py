"""AIPerf as a bench client: its JSON summary first, its printed table as a cross-check; runs nothing.

What it calls inter token latency is a mean of each request without the first token, our TPOT; its inter chunk latency
are the gaps, our ITL. It counts tokens with its own tokenizer; where the server tells usage, that is taken instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from state.models import Metrics
from tools.benches.base import Place
from tools.benches.escorted import EscortedClient
from tools.benches.told import ROUNDED, Asked, Figures, inconsistent, loads, missing_answers
from tools.target import RunRequest

KEPT = (
    *("request_count", "error_request_count", "completed_request_count", "benchmark_duration"),
    *(
        "request_throughput",
        "output_token_throughput",
        "effective_concurrency",
        "total_isl",
        "total_osl",
        "total_output_tokens",
    ),
    *("usage_prompt_tokens", "usage_completion_tokens", "usage_prompt_cache_read_tokens", "output_sequence_length"),
    *("time_to_first_token", "inter_token_latency", "inter_chunk_latency", "request_latency"),
)
PARTS = ("avg", "sum", "min", "p50", "p90", "p99", "count")


class AiPerf(EscortedClient):
    """NVIDIA's AIPerf, for any server with a completions endpoint."""

    name = "aiperf"
    result = "profile_export_aiperf.json"
    begin = "Phase profiling (profiling) started"
    end = "Phase profiling (profiling) complete"
    one_process = False
    rows = r"Time to First Token \(|Request Latency \("
    environment: ClassVar[
        Mapping[str, str]
    ] = {}  # with HF_HUB_OFFLINE it takes a local tokenizer for a name on the hub, and refuses it
    lacks = (
        "token ids as prompts: it sends text, which the server may cut into a token more or less",
        "an API key, other than where everybody on the host can read it",
        "whether it was the limit itself: it works in several processes",
    )

    def words(self, request: RunRequest, at: Place) -> tuple[str, ...]:
        """See `EscortedClient.words`."""
        point = request.point
        return (
            *("--model", at.model or "", "--url", at.url, "--endpoint-type", "completions", "--streaming"),
            *("--concurrency", str(point.concurrency), "--request-count", str(point.requests)),
            *("--synthetic-input-tokens-mean", str(point.prompt_tokens), "--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(point.output_tokens), "--output-tokens-stddev", "0"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--random-seed", str(request.seed), "--tokenizer", self.tokenizer),
            *("--artifact-dir", ".", "--export-level", "summary", "--ui", "simple"),
            *("--no-gpu-telemetry", "--no-server-metrics"),
        )

    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`."""
        return (self.command[0], "--version")

    def condensed(self, text: str, asked: Asked) -> dict[str, Any]:
        """The summaries that we read, and whether it says that it went to its end."""
        whole = loads(text)
        for phase in (whole.get("input_config") or {}).get("phases") or ():
            if phase.get("kind") == "profiling" and phase.get("concurrency") not in (None, asked.concurrency):
                raise ValueError(f"it is the result of another run: concurrency is {phase['concurrency']}")
        kept = {name: {part: whole[name].get(part) for part in PARTS} for name in KEPT if whole.get(name)}
        return {
            "version": whole.get("aiperf_version"),
            "whole": bool(whole.get("is_complete", True)) and not whole.get("was_cancelled"),
            **kept,
        }

    def figures(self, told: Figures, asked: Asked) -> Metrics:
        """See `EscortedClient.figures`."""
        completed = told.count("request_count.avg") or 0
        failed = told.count("error_request_count.avg") or 0
        by_server, by_client = told.count("usage_completion_tokens.sum"), told.count("total_osl.avg")
        output = by_client if by_server is None else by_server
        if output is None:
            raise ValueError("the client does not tell how many tokens came")
        least = told.number("output_sequence_length.min" if by_server is None else "usage_completion_tokens.min")
        short = missing_answers(output, completed, asked) or int((least or 0) < asked.output_tokens and completed > 0)
        return Metrics(
            requested=told.count("completed_request_count.avg") or completed + failed,
            completed=completed,
            failed=failed,
            failures={"errors": failed} if failed else {},
            short_outputs=short,
            duration_s=told.needed("benchmark_duration.avg"),
            prompt_tokens=told.count("usage_prompt_tokens.sum") or told.count("total_isl.avg") or 0,
            output_tokens=output,
            retokenized_tokens=None if by_server is None else by_client,
            cached_tokens=told.count("usage_prompt_cache_read_tokens.sum"),
            output_tok_s=None,
            ttft_ms=told.latency(_names("time_to_first_token")),
            tpot_ms=told.latency(_names("inter_token_latency")),
            itl_ms=told.latency(_names("inter_chunk_latency")),
            e2e_ms=told.latency(_names("request_latency")),
            mean_concurrency=told.number("effective_concurrency.avg"),
            stopped_early=None if told.get("whole") else "the client says that it was cancelled",
        )

    def contradictions(self, told: Figures, printed: str) -> Iterable[str]:
        """See `EscortedClient.contradictions`; rows that a narrow table breaks are not found, which says nothing."""
        for label, path in (("Time to First Token", "time_to_first_token"), ("Request Latency", "request_latency")):
            row = re.search(rf"{label} \(ms\)\s*[│|]\s*([\d,.]+)\s*[│|]", printed)
            written = told.get(f"{path}.avg")
            if row and isinstance(written, int | float) and abs(float(row[1].replace(",", "")) - written) > ROUNDED:
                yield f"{label} is printed as {row[1]}, written as {written}"
        own, requests = told.number("total_osl.avg"), told.number("request_count.avg")
        if own is not None:
            # Its rates are over all it observed, which is up to a tenth of a second longer than its benchmark.
            rate = told.number("request_throughput.avg")
            window = requests / rate if requests and rate else told.needed("benchmark_duration.avg")
            yield from inconsistent(told, "output_token_throughput.avg", own, window)


def _names(what: str) -> dict[str, str]:
    return {"mean": f"{what}.avg", **{part: f"{what}.{part}" for part in ("p50", "p90", "p99")}}
