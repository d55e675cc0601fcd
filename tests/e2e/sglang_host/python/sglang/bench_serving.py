"""`python -m sglang.bench_serving`: the words and the result line of 0.5.17's client, the figures of the scenario.

It asks the server for one run and writes what it is told as a client writes what it measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from typing import Any

TTFT_SHARE = 0.08
"""Of a request's time, until its first token."""
SPREADS = {"mean": 1.0, "median": 0.999, "std": 0.01, "p90": 1.013, "p95": 1.016, "p99": 1.023}
GAPS = 4
"""Gaps that are told of each request: its tokens come in pieces."""
LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
WIDTH = 50


def parser() -> argparse.ArgumentParser:
    """Those of the client's options that are of use here."""
    made = argparse.ArgumentParser(prog="bench_serving.py")
    made.add_argument("--backend", choices=["sglang", "sglang-native", "sglang-oai", "vllm"], default="sglang")
    made.add_argument("--base-url", required=True)
    made.add_argument("--dataset-name", choices=["sharegpt", "random", "random-ids"], default="sharegpt")
    made.add_argument("--random-range-ratio", type=float, default=0.0)
    for name in ("--model", "--tokenizer", "--output-file"):
        made.add_argument(name)
    for name, usual in (("--random-input-len", 1024), ("--random-output-len", 1024), ("--num-prompts", 1000)):
        made.add_argument(name, type=int, default=usual)
    for name, usual in (("--seed", 1), ("--warmup-requests", 1), ("--max-concurrency", 0)):
        made.add_argument(name, type=int, default=usual)
    made.add_argument("--request-rate", type=float, default=float("inf"))
    for name in ("--output-details", "--disable-tqdm", "--disable-ignore-eos"):
        made.add_argument(name, action="store_true")
    return made


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One exchange with the server."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def figures(args: argparse.Namespace, output_tok_s: float) -> dict[str, Any]:
    """The client's figures for a throughput."""
    requests, tokens = args.num_prompts, args.random_output_len
    streams = args.max_concurrency or requests
    duration = requests * tokens / output_tok_s
    e2e_ms = 1e3 * duration * streams / requests
    means = {"e2e_latency": e2e_ms, "ttft": TTFT_SHARE * e2e_ms}
    means["tpot"] = means["itl"] = (1 - TTFT_SHARE) * e2e_ms / (tokens - 1)
    told: dict[str, Any] = {
        "tag": None,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": args.request_rate,
        "max_concurrency": args.max_concurrency or None,
        "sharegpt_output_len": None,
        "random_input_len": args.random_input_len,
        "random_output_len": tokens,
        "random_range_ratio": args.random_range_ratio,
        "server_info": None,
        "duration": duration,
        "completed": requests,
        "total_input_tokens": requests * args.random_input_len,
        "total_output_tokens": requests * tokens,
        "total_output_tokens_retokenized": requests * tokens,
        "request_throughput": requests / duration,
        "input_throughput": requests * args.random_input_len / duration,
        "output_throughput": output_tok_s,
        "total_throughput": requests * (args.random_input_len + tokens) / duration,
    }
    for name, mean in means.items():
        told |= {f"{part}_{name}_ms": mean * factor for part, factor in SPREADS.items()}
    return told | {"concurrency": 0.995 * streams, "accept_length": None, "max_concurrent_requests": streams}


def details(args: argparse.Namespace, told: dict[str, Any]) -> dict[str, Any]:
    """What `--output-details` adds: a list with an entry for each request."""
    rest = (told["mean_e2e_latency_ms"] - told["mean_ttft_ms"]) / 1e3
    return {
        "input_lens": [args.random_input_len] * args.num_prompts,
        "output_lens": [args.random_output_len] * args.num_prompts,
        "ttfts": [round(told["mean_ttft_ms"] / 1e3, 6)] * args.num_prompts,
        "itls": [[round(rest / GAPS, 6)] * GAPS] * args.num_prompts,
        "errors": [""] * args.num_prompts,
    }


def block(told: dict[str, Any]) -> str:
    """The printed result."""
    rows = {
        "Backend:": told["backend"],
        "Traffic request rate:": told["request_rate"],
        "Max request concurrency:": told["max_concurrency"] or "not set",
        "Successful requests:": told["completed"],
        "Benchmark duration (s):": told["duration"],
        "Total input tokens:": told["total_input_tokens"],
        "Total generated tokens:": told["total_output_tokens"],
        "Total generated tokens (retokenized):": told["total_output_tokens_retokenized"],
        "Request throughput (req/s):": told["request_throughput"],
        "Input token throughput (tok/s):": told["input_throughput"],
        "Output token throughput (tok/s):": told["output_throughput"],
        "Total token throughput (tok/s):": told["total_throughput"],
        "Concurrency:": told["concurrency"],
    }
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(row(label, value) for label, value in rows.items())]
    for name, (title, short) in LATENCIES.items():
        lines.append(title.center(WIDTH, "-"))
        parts = {"mean": "Mean", "median": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}
        lines += [row(f"{word} {short} (ms):", told[f"{part}_{name}_ms"]) for part, word in parts.items()]
    return "\n".join([*lines, "=" * WIDTH])


def row(label: str, value: object) -> str:
    """A label and its value, as the client lays them out."""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def main() -> None:
    """The program."""
    args = parser().parse_args()
    prompts = [[1000 + args.seed % 1000 + place] * args.random_input_len for place in range(args.warmup_requests)]
    if prompts:
        print(f"Starting warmup with {len(prompts)} sequences...", flush=True)
    for prompt in prompts:
        ask(f"{args.base_url}/v1/completions", {"prompt": prompt, "max_tokens": args.random_output_len})
    said = f"Warmup completed with {len(prompts)} sequences. " if prompts else ""
    print(f"{said}Starting main benchmark run...", flush=True)
    load = {
        "concurrency": args.max_concurrency or args.num_prompts,
        "requests": args.num_prompts,
        "prompt_tokens": args.random_input_len,
        "output_tokens": args.random_output_len,
    }
    told = figures(args, ask(f"{args.base_url}/stand_in/run", load)["output_tok_s"])
    print(f"\n{block(told)}", flush=True)
    if args.output_file:
        with open(args.output_file, "a", encoding="utf-8") as out:
            out.write(json.dumps(told | (details(args, told) if args.output_details else {})) + "\n")


if __name__ == "__main__":
    sys.exit(main())
