"""The vLLM server: its flags, questions and answers; pure, it neither runs nor asks anything.

Two command lines are one engine: `vllm serve MODEL` and `python -m vllm.entrypoints.openai.api_server --model MODEL`.
How they read follows vLLM's `vllm/utils/argparse_utils.py`; what the answers mean was seen on 0.25.1 (H200) and 0.32.0
(CPU).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from state.models import Change, LaunchSpec
from tools.servers import argv as words
from tools.servers import completions, python_server
from tools.servers import vllm_state as state
from tools.servers.apply import applied
from tools.servers.argparse_help import parse_help
from tools.servers.base import FlagTable, FlagType, HttpAnswer
from tools.servers.python_server import ANSWERS, ENV_PREFIXES, PLACES, REACHES, REFUSES, REPORTS, SERVES

SYNTAX = words.Syntax(
    equals=True,
    underscores=True,
    abbreviations=True,
    joined=True,
    dotted=True,
    dashes=False,
    subcommands=frozenset({"serve"}),
    positional="--model",
    units={"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
    accumulating=frozenset({"--middleware"}),
)

JSON_TEXT = re.compile(r"Should either be a valid JSON string or JSON keys")
SIZE_TEXT = re.compile(r"human-readable")
TYPES: dict[FlagType, str] = {
    "int": "api-server-count block-size cpu-distributed-timeout-seconds cudagraph-capture-sizes "
    "data-parallel-size-local distributed-timeout-seconds mamba-block-size max-cpu-loras max-cudagraph-capture-size "
    "max-log-len max-num-seqs max-parallel-loading-workers num-gpu-blocks-override spec-tokens max-num-active-seqs "
    "max-num-queued-reqs elastic-ep-max-dp-size grpc-port max-lora-cls-labels prefix-match-unit",
    "float": "kv-offloading-size video-pruning-rate",
    "json": "additional-config hf-overrides model-loader-extra-config",
}
"""Types of flags whose help shows neither a default nor choices."""
FACTS: dict[str, dict[str, object]] = {
    "--api-key": {"env": "VLLM_API_KEY"},
    "--gpu-memory-utilization": {"low": 0.0, "high": 1.0},
    "--max-model-len": {"choices": ("auto", "-1")},
    "--port": {"low": 1.0, "high": 65535.0},
}

FIXED_NAMES = {
    SERVES: "model served-model-name tokenizer tokenizer-revision tokenizer-mode revision code-revision "
    "hf-config-path hf-overrides host port uds root-path api-key ssl-* enable-ssl-refresh allow-credentials allowed-* "
    "*lora* runner convert pooler-config config config-format grpc* headless tokens-only limit-mm-per-prompt "
    "enable-prompt-embeds enable-mm-embeds language-model-only mm-encoder-only cohere-* enable-scale-out",
    PLACES: "data-parallel-address data-parallel-rpc-port data-parallel-rank data-parallel-start-rank "
    "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb master-* nnodes node-rank "
    "device-ids data-parallel-supervisor-port dp-supervisor-*",
    ANSWERS: "chat-template* default-chat-template-kwargs trust-request-chat-template response-role "
    "tool-call-parser enable-auto-tool-choice exclude-tools-when-tool-choice-none reasoning-* generation-config "
    "*logprobs* seed override-generation-config logits-processors return-tokens-as-token-ids "
    "enable-force-include-usage enable-prompt-tokens-details skip-tokenizer-init model-class-overrides "
    "io-processor-plugin interleave-mm-strings enable-return-routed-experts enable-per-request-metrics anthropic-* "
    "tool-strict-level trust-request-mm-kwargs return-sampling-mask watermark-config enable-trace-replay "
    "per-request-* aux-output-config",
    REFUSES: "max-num-queued-*",
    REACHES: "trust-remote-code download-dir hf-token tool-server tool-parser-plugin middleware *-cls load-format "
    "ignore-patterns model-loader-extra-config pt-load-map-location kv-transfer-config ec-transfer-config "
    "kv-events-config weight-transfer-config profiler-config otlp-traces-endpoint collect-detailed-traces "
    "ray-workers-use-nsight mm-encoder-fp8-scale-*-path",
    REPORTS: "help log-* max-log-len enable-log-* enable-logging-* disable-log-stats aggregate-engine-logging "
    "uvicorn-* disable-uvicorn-access-log disable-access-log-for-endpoints disable-fastapi-docs enable-offline-docs "
    "fingerprint-* enable-request-id-headers show-hidden-metrics-for-version shutdown-timeout "
    "enable-layerwise-nvtx-tracing enable-tokenizer-info-endpoint enable-server-load-tracking logging-config "
    "custom-histogram-buckets",
}
"""Reason → names (with * for anything) of flags that no experiment may touch; a switch's negative goes with it."""
FIXED_ENV = {
    "VLLM_HOST_IP": PLACES,
    "VLLM_PORT": SERVES,
    "VLLM_SERVER_DEV_MODE": REPORTS,
    "VLLM_ALLOW_*": REACHES,
    "VLLM_USE_MODELSCOPE": REACHES,
    "VLLM_*_STATS": REPORTS,
}
HOT = {
    "reset_prefix_cache": "emptying the prefix cache is no setting: it belongs to a measurement, and needs "
    "VLLM_SERVER_DEV_MODE=1, which no production server has",
    "sleep": "a sleeping server serves nobody",
    "profile": "a profile slows the server down while it is taken",
}


class Vllm(python_server.PythonServer):
    """vLLM's command line and HTTP API."""

    engine: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    syntax: ClassVar[words.Syntax] = SYNTAX
    secret_flags: ClassVar[frozenset[str]] = frozenset({"--api-key", "--hf-token", "--watermark-config"})
    env_prefixes: ClassVar[tuple[str, ...]] = ("VLLM_", *ENV_PREFIXES)
    fixed_names: ClassVar[Mapping[str, str]] = FIXED_NAMES
    fixed_env: ClassVar[Mapping[str, str]] = FIXED_ENV
    default_port: ClassVar[int] = 8000
    certificate: ClassVar[str] = "--ssl-certfile"
    no_tcp: ClassVar[tuple[str, ...]] = ("--uds", "--grpc", "--headless")
    looks: ClassVar[Mapping[str, str]] = {
        "health": "/health",
        "models": "/v1/models",
        "version": "/version",
        "metrics": "/metrics",
    }
    hot: ClassVar[Mapping[str, str]] = HOT
    version_words: ClassVar[tuple[str, ...]] = ("--version",)

    def help_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.help_command`; a plain --help lists groups only (0.25)."""
        return (*program, "--help=all")

    def parse_help(self, text: str) -> FlagTable:
        """See `ServerAdapter.parse_help`. `-O3` is a level of optimisation, which the help does not say."""
        table = parse_help(text, self.engine)
        table = python_server.by_text(table, JSON_TEXT, "json")
        table = python_server.by_text(table, SIZE_TEXT, "size")
        level = table.flags.get("--optimization-level")
        short = {} if level is None or "-O" in table.spellings else {level.name: {"aliases": (*level.aliases, "-O")}}
        return python_server.completed(python_server.typed(table, TYPES), {**FACTS, **short})

    def apply(self, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
        """See `ServerAdapter.apply`."""
        return applied(self, spec, changes, known)

    def is_loading(self, answer: HttpAnswer) -> bool:
        """Never: the port opens once the engine is ready; /health says 503 when the engine has died (0.25, 0.32)."""
        return False

    def counters(self, answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
        """See `ServerAdapter.counters`."""
        return completions.sums(answers, state.COUNTERS)

    def in_flight(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """See `ServerAdapter.in_flight`."""
        return state.in_flight(answers)

    def requests(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """See `ServerAdapter.requests`."""
        return completions.total(answers, state.REQUESTS)

    def effective(self, answers: Mapping[str, HttpAnswer], log: str = "") -> dict[str, str]:
        """See `ServerAdapter.effective`."""
        return state.effective(answers, log)

    def mismatches(self, spec: LaunchSpec, effective: Mapping[str, str]) -> tuple[str, ...]:
        """See `ServerAdapter.mismatches`."""
        return state.mismatches(spec, effective)

    def remarks(self, log: str) -> tuple[str, ...]:
        """See `ServerAdapter.remarks`."""
        return state.remarks(log)
