"""guidellm as a bench client: its JSON first, its printed totals as a cross-check; runs nothing.

Its names are its own: what it calls inter token latency is a mean of each request without the first token, our TPOT;
what it calls time per output token is the latency over all tokens, which nobody else tells. Its averages over all
requests mix in those that failed (vllm-project/guidellm#444), so only those of the successful ones are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from state.models import Metrics
from tools.benches.base import Place
from tools.benches.escorted import EscortedClient
from tools.benches.told import Asked, Figures, inconsistent, loads, missing_answers
from tools.target import RunRequest

LATENCIES = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
SUMS = ("prompt_token_count", "output_token_count")
RATES = ("output_tokens_per_second", "request_concurrency")


class GuideLlm(EscortedClient):
    """The client of the vLLM project's guidellm, for any server with a completions endpoint."""

    name = "guidellm"
    result = "client.json"
    begin = "Starting benchmark for strategy"
    end = "All benchmarks finalized"
    one_process = False
    rows = r"^\|\s*concurrent@"
    lacks = (
        "token ids as prompts: it sends text, which the server may cut into a token more or less",
        "an API key, other than where everybody on the host can read it",
        "the gaps between chunks (ITL)",
        "greedy decoding: the server's own default holds",
        "whether it was the limit itself: it works in several processes",
    )

    def words(self, request: RunRequest, at: Place) -> tuple[str, ...]:
        """See `EscortedClient.words`. It ignores EOS by itself when it asks for a number of tokens."""
        point = request.point
        backend = f"kind=openai_http,target={at.url},model={at.model},request_format={request.workload.endpoint}"
        return (
            *("--backend", backend, "--profile", f"kind=concurrent,streams={point.concurrency}"),
            *("--constraint", f"kind=max_requests,count={point.requests}"),
            *("--tokenizer", f"kind=hf_auto,model={self.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={point.prompt_tokens},output_tokens={point.output_tokens}"),
            *("--seed", f"kind=static,value={request.seed}", "--metrics", "kind=generative,sample_size=0"),
            *("--output", f"kind=json,path={self.result}", "--output", "kind=console", "--disable-progress"),
        )

    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`."""
        return (self.command[0], "--version")

    def condensed(self, text: str, asked: Asked) -> dict[str, Any]:
        """The one benchmark's totals and the summaries of its successful requests."""
        whole = loads(text)
        benches = whole["benchmarks"]
        if len(benches) != 1:
            raise ValueError(f"it holds {len(benches)} benchmarks where one was asked")
        bench, metrics = benches[0], benches[0]["metrics"]
        streams = bench["config"]["strategy"].get("streams")
        if streams not in (None, asked.concurrency):
            raise ValueError(f"it is the result of another run: streams is {streams}, asked were {asked.concurrency}")
        cached = [one.get("cached_tokens") for one in bench.get("requests", {}).get("successful") or ()]
        known = [count for count in cached if count is not None]
        return {
            "version": whole.get("metadata", {}).get("guidellm_version"),
            "duration": bench.get("duration"),
            "cached_tokens": sum(known) if known else None,
            "requests": metrics["request_totals"],
            **{name: _summary(metrics[name]["successful"]) for name in LATENCIES},
            **{name: {"sum": metrics[name]["successful"]["total_sum"]} for name in SUMS},
            **{name: {"mean": metrics[name]["total"]["mean"]} for name in RATES},
            "least_output": metrics["output_token_count"]["successful"]["min"],
        }

    def figures(self, told: Figures, asked: Asked) -> Metrics:
        """See `EscortedClient.figures`."""
        completed, output = int(told.needed("requests.successful")), int(told.needed("output_token_count.sum"))
        errored, incomplete = told.count("requests.errored") or 0, told.count("requests.incomplete") or 0
        failures = {"errored": errored, "incomplete": incomplete}
        for name in LATENCIES:
            told.number(f"{name}.least")  # notes an impossible one
        short = missing_answers(output, completed, asked)
        if not short and completed and (told.number("least_output") or 0) < asked.output_tokens:
            short = 1
        return Metrics(
            requested=int(told.needed("requests.total")),
            completed=completed,
            failed=errored + incomplete,
            failures={kind: count for kind, count in failures.items() if count},
            short_outputs=short,
            duration_s=told.needed("duration"),
            prompt_tokens=told.count("prompt_token_count.sum") or 0,
            output_tokens=output,
            cached_tokens=told.count("cached_tokens"),
            output_tok_s=None,
            ttft_ms=told.latency(_names("time_to_first_token_ms")),
            tpot_ms=told.latency(_names("inter_token_latency_ms")),
            e2e_ms=told.latency(_names("request_latency"), scale=1e3),
            mean_concurrency=told.number("request_concurrency.mean"),
        )

    def contradictions(self, told: Figures, printed: str) -> Iterable[str]:
        """See `EscortedClient.contradictions`; of its tables the row of counts: completed, incomplete, errored."""
        number = r"\s*([\d.]+)\s*\|"
        row = re.search(
            rf"^\|\s*concurrent@\d+\s*\|[^|]+\|[^|]+\|[^|]+\|[^|]+\|[^|]+\|{number * 3}", printed, re.MULTILINE
        )
        if row is None:
            yield "it did not print its totals"
        for shown, path in zip(row.groups() if row else (), ("successful", "incomplete", "errored"), strict=False):
            if float(shown) != told.get(f"requests.{path}"):
                yield f"{path} requests are printed as {shown}, written as {told.get(f'requests.{path}')}"
        if not (told.get("requests.errored") or told.get("requests.incomplete")):
            rate, output = "output_tokens_per_second.mean", told.needed("output_token_count.sum")
            yield from inconsistent(told, rate, output, told.needed("duration"))


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Of a distribution what we read; `least` tells of impossible values (vllm-project/guidellm#529)."""
    if not found["count"]:
        return {}
    at = found["percentiles"]
    return {"mean": found["mean"], "p50": at["p50"], "p90": at["p90"], "p99": at["p99"], "least": found["min"]}


def _names(what: str) -> dict[str, str]:
    return {part: f"{what}.{part}" for part in ("mean", "p50", "p90", "p99")}
