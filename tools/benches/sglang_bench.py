"""`sglang.bench_serving` as a bench client: its JSONL line first, its printed block as a cross-check; runs nothing.

Its options are those of 0.4.6.post5 and later. Lines and blocks of 0.4.0 to 0.5.23 are read: fields and labels came,
went and were spelled anew in between, so each is looked up by name, and one that is not there is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from state.models import Metrics
from tools.benches import stream_client
from tools.benches.base import Place
from tools.benches.escorted import ENGINE_KEY, EscortedClient
from tools.benches.told import Asked, Figures, inconsistent, kind_of, loads, missing_answers, names, single_figures
from tools.target import RunRequest

PRINTED_AS = {
    "Max request concurrency": "max_concurrency",
    "Max reqeuest concurrency": "max_concurrency",  # until 0.4.0
    "Successful requests": "completed",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Total generated tokens (retokenized)": "total_output_tokens_retokenized",
    "Request throughput (req/s)": "request_throughput",
    "Output token throughput (tok/s)": "output_throughput",
    "Concurrency": "concurrency",
    "Mean E2E Latency (ms)": "mean_e2e_latency_ms",
    "Median E2E Latency (ms)": "median_e2e_latency_ms",
    "Mean TTFT (ms)": "mean_ttft_ms",
    "Median TTFT (ms)": "median_ttft_ms",
    "P99 TTFT (ms)": "p99_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "Median TPOT (ms)": "median_tpot_ms",
    "P99 TPOT (ms)": "p99_tpot_ms",
    "Mean ITL (ms)": "mean_itl_ms",
    "Median ITL (ms)": "median_itl_ms",
    "P99 ITL (ms)": "p99_itl_ms",
}


class SglangBench(EscortedClient):
    """The client of SGLang, for any server with a completions endpoint."""

    name = "sglang"
    result = "client.jsonl"
    begin = "Starting main benchmark run"
    end = " Serving Benchmark Result "
    one_process = True
    printed_as = PRINTED_AS
    needed_labels = ("Successful requests", "Benchmark duration (s)", "Total generated tokens", "Mean TTFT (ms)")
    key_variables = ENGINE_KEY
    lacks = (
        "token ids as prompts: it sends text, which the server may cut into a token more or less",
        "the tokens that came: where the server tells no usage, it counts those that it asked for",
        "failed requests: they are those that are missing",
    )

    def words(self, request: RunRequest, at: Place) -> tuple[str, ...]:
        """See `EscortedClient.words`. Lengths are fixed only at a ratio of 1; EOS is ignored by default."""
        point = request.point
        return (
            *("--backend", "vllm", "--base-url", at.url, "--model", at.model or "", "--tokenizer", self.tokenizer),
            *("--dataset-name", "random-ids", "--random-range-ratio", "1.0"),
            *("--random-input-len", str(point.prompt_tokens), "--random-output-len", str(point.output_tokens)),
            *("--num-prompts", str(point.requests), "--max-concurrency", str(point.concurrency)),
            *("--seed", str(request.seed), "--warmup-requests", "0"),
            *("--output-file", self.result, "--output-details", "--disable-tqdm"),
        )

    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`; its own module takes seconds to load, the package's record does not.

        Where the client is a file of its own, it need only be readable.
        """
        if len(self.command) > 1 and self.command[1].endswith(".py"):
            return (self.command[0], "-c", "import sys; open(sys.argv[1]); print(sys.argv[1])", self.command[1])
        return (self.command[0], "-c", "import importlib.metadata as m; print(m.version('sglang'))")

    def condensed(self, text: str, asked: Asked) -> dict[str, Any]:
        """The last line, for it appends; its long lists as the few figures that only they tell."""
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError("the client's result is empty")
        line: dict[str, Any] = loads(lines[-1])
        told = single_figures(line)
        for name, said, wanted in (
            ("max_concurrency", told.get("max_concurrency"), asked.concurrency),
            ("random_output_len", told.get("random_output_len"), asked.output_tokens),
        ):
            if said is not None and said != wanted:
                raise ValueError(f"it is the result of another run: {name} is {said}, asked were {wanted}")
        errors = line.get("errors")
        if isinstance(errors, list) and "output_lens" in line:
            good = [not error for error in errors]
            told["requested"] = len(good)
            told["failures"] = dict(Counter(kind_of(str(error)) for error in errors if error))
            told["short"] = sum(n < asked.output_tokens for n, ok in zip(line["output_lens"], good, strict=True) if ok)
            _add_p90(told, [row for row, ok in zip(_rows(line), good, strict=True) if ok])
        return told

    def figures(self, told: Figures, asked: Asked) -> Metrics:
        """See `EscortedClient.figures`."""
        completed, output = int(told.needed("completed")), int(told.needed("total_output_tokens"))
        requested = told.count("requested") or asked.requests
        short = told.count("short")
        failures = told.get("failures") or {}
        missing = max(0, requested - completed - sum(failures.values()))
        return Metrics(
            requested=requested,
            completed=completed,
            failed=requested - completed,
            failures={**failures, **({"missing": missing} if missing else {})},
            short_outputs=missing_answers(output, completed, asked) if short is None else short,
            duration_s=told.needed("duration"),
            prompt_tokens=told.count("total_input_tokens") or 0,
            output_tokens=output,
            retokenized_tokens=told.count("total_output_tokens_retokenized"),
            ttft_ms=told.latency(names("ttft")) if completed else told.latency({}),
            tpot_ms=told.latency(names("tpot")) if completed else told.latency({}),
            itl_ms=told.latency(names("itl")) if completed else told.latency({}),
            e2e_ms=told.latency(names("e2e_latency")),
            mean_concurrency=told.number("concurrency"),
            output_tok_s=None,
        )

    def contradictions(self, told: Figures, printed: str) -> Iterable[str]:
        """See `EscortedClient.contradictions`."""
        yield from inconsistent(told, "output_throughput", told.needed("total_output_tokens"), told.needed("duration"))


def _rows(line: Mapping[str, Any]) -> Iterable[tuple[int, float, list[float]]]:
    return zip(line["output_lens"], line["ttfts"], line["itls"], strict=True)


def _add_p90(told: dict[str, Any], rows: list[tuple[int, float, list[float]]]) -> None:
    """The 90th percentiles, which versions before 0.5.10 leave to their lists; E2E is TTFT and the gaps after it."""
    told.setdefault("p90_ttft_ms", _p90(ttft for _, ttft, _ in rows))
    told.setdefault("p90_itl_ms", _p90(gap for _, _, gaps in rows for gap in gaps))
    told.setdefault("p90_tpot_ms", _p90(sum(gaps) / (count - 1) for count, _, gaps in rows if count > 1))
    told.setdefault("p90_e2e_latency_ms", _p90(ttft + sum(gaps) for _, ttft, gaps in rows))


def _p90(seconds: Iterable[float]) -> float | None:
    """In ms, as the other percentiles of this client: linear between order statistics."""
    at = stream_client.percentile(sorted(seconds), 0.9)
    return None if at is None else at * 1e3
