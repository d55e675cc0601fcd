"""`vllm bench serve` as a bench client: its JSON first, its printed block as a cross-check; runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from state.models import Metrics
from tools.benches.base import Place
from tools.benches.escorted import ENGINE_KEY, EscortedClient
from tools.benches.told import Asked, Figures, inconsistent, kind_of, loads, missing_answers, names, single_figures
from tools.target import RunRequest

PRINTED_AS = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Output token throughput (tok/s)": "output_throughput",
    "Mean TTFT (ms)": "mean_ttft_ms",
    "Median TTFT (ms)": "median_ttft_ms",
    "P90 TTFT (ms)": "p90_ttft_ms",
    "P99 TTFT (ms)": "p99_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "P99 TPOT (ms)": "p99_tpot_ms",
    "Mean ITL (ms)": "mean_itl_ms",
    "P99 ITL (ms)": "p99_itl_ms",
    "Mean E2EL (ms)": "mean_e2el_ms",
    "P99 E2EL (ms)": "p99_e2el_ms",
}


class VllmBench(EscortedClient):
    """The client of vLLM, for any server with a completions endpoint."""

    name = "vllm"
    result = "client.json"
    begin = "Starting main benchmark run"
    end = " Serving Benchmark Result "
    one_process = True
    printed_as = PRINTED_AS
    needed_labels = ("Successful requests", "Benchmark duration (s)", "Total generated tokens")
    key_variables = ENGINE_KEY
    lacks = ("token ids as prompts: it sends text, which the server may cut into a token more or less",)

    def words(self, request: RunRequest, at: Place) -> tuple[str, ...]:
        """See `EscortedClient.words`. Here a ratio of 0 fixes the lengths, and greedy decoding must be asked for."""
        point = request.point
        return (
            *("--backend", "openai", "--base-url", at.url, "--endpoint", request.workload.endpoint),
            *("--model", at.model or "", "--tokenizer", self.tokenizer),
            *("--dataset-name", "random", "--random-range-ratio", "0.0"),
            *("--random-input-len", str(point.prompt_tokens), "--random-output-len", str(point.output_tokens)),
            *("--num-prompts", str(point.requests), "--max-concurrency", str(point.concurrency)),
            *("--seed", str(request.seed), "--ignore-eos", "--temperature", "0"),
            # On a connection that is kept, llama.cpp loses requests: its server closes it while the next one is sent.
            *("--header", "Connection=close"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
            *("--save-result", "--save-detailed", "--result-dir", ".", "--result-filename", self.result),
            "--disable-tqdm",
        )

    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`."""
        return (self.command[0], "--version")

    def condensed(self, text: str, asked: Asked) -> dict[str, Any]:
        """All single figures, and of the lists what only they tell."""
        whole: dict[str, Any] = loads(text)
        told = single_figures(whole)
        for name, wanted in (("max_concurrency", asked.concurrency), ("num_prompts", asked.requests)):
            if told.get(name) not in (None, wanted):
                raise ValueError(f"it is the result of another run: {name} is {told[name]}, asked were {wanted}")
        errors, lengths = whole.get("errors"), whole.get("output_lens")
        if isinstance(errors, list) and isinstance(lengths, list):
            told["failures"] = dict(Counter(kind_of(str(error)) for error in errors if error))
            rows = zip(lengths, whole.get("itls") or [()] * len(lengths), errors, strict=True)
            came = [_came(count, len(gaps) + 1, asked.output_tokens) for count, gaps, error in rows if not error]
            told["came"] = sum(came)
            told["short"] = sum(count < asked.output_tokens for count in came)
        if isinstance(whole.get("latencies"), list) and told.get("duration"):
            told["concurrency"] = sum(whole["latencies"]) / told["duration"]
        return told

    def figures(self, told: Figures, asked: Asked) -> Metrics:
        """See `EscortedClient.figures`. Older versions tell no `failed`; what is missing has failed."""
        completed, counted = int(told.needed("completed")), int(told.needed("total_output_tokens"))
        came = told.count("came")
        output = counted if came is None else came
        requested = told.count("num_prompts") or asked.requests
        failed = told.count("failed")
        short = told.count("short")
        return Metrics(
            requested=requested,
            completed=completed,
            failed=requested - completed if failed is None else failed,
            failures=told.get("failures") or ({"failed": requested - completed} if completed < requested else {}),
            short_outputs=missing_answers(output, completed, asked) if short is None else short,
            duration_s=told.needed("duration"),
            prompt_tokens=told.count("total_input_tokens") or 0,
            output_tokens=output,
            retokenized_tokens=counted if counted < output else None,
            ttft_ms=told.latency(names("ttft")),
            tpot_ms=told.latency(names("tpot")),
            itl_ms=told.latency(names("itl")),
            e2e_ms=told.latency(names("e2el")),
            mean_concurrency=told.number("concurrency"),
            output_tok_s=None,
        )

    def contradictions(self, told: Figures, printed: str) -> Iterable[str]:
        """See `EscortedClient.contradictions`."""
        yield from inconsistent(told, "output_throughput", told.needed("total_output_tokens"), told.needed("duration"))


def _came(counted: int, chunks: int, asked: int) -> int:
    """Tokens of an answer.

    Where the server tells its usage in the last chunk of text, as llama.cpp does, the client does not see it and counts
    the text anew. That may miss a token, though each came in a chunk of its own.
    """
    return asked if asked / 2 <= counted < asked <= chunks else counted
