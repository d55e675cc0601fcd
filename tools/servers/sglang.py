"""The SGLang server: its flags, questions and answers; pure, it neither runs nor asks anything.

`sglang serve MODEL` and `python -m sglang.launch_server --model-path MODEL` are one engine. What the answers mean was
seen on 0.5.17 (H200) in recorded output; no SGLang was run against this adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from state.models import Change, LaunchSpec
from tools.servers import argv as words
from tools.servers import completions, python_server
from tools.servers import sglang_state as state
from tools.servers.apply import applied
from tools.servers.argparse_help import parse_help
from tools.servers.base import FlagTable, FlagType, HotSetting, HttpAnswer, HttpRequest, KnownFlag
from tools.servers.python_server import ANSWERS, ENV_PREFIXES, PLACES, REACHES, REFUSES, REPORTS, SERVES

SYNTAX = words.Syntax(
    equals=True,
    abbreviations=True,
    dashes=False,
    subcommands=frozenset({"serve"}),
    positional="--model-path",
    units={
        "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    },
)  # fmt: skip
"""`--a_b` is not `--a-b`, which is the commonest mistake (sgl-project/sglang#12818)."""

OTHER_HELP = re.compile(r"^--- Help for Diffusion", re.MULTILINE)
SIZE_TEXT = re.compile(r"Supports standard SI suffixes")
TYPES: dict[FlagType, str] = {
    "int": "asr-max-buffer-seconds asr-max-concurrent-sessions attn-cp-size base-gpu-id batch-notify-size "
    "chunked-prefill-size cpu-offload-gb cuda-graph-bs-decode cuda-graph-bs-prefill cuda-graph-max-bs-decode "
    "cuda-graph-max-bs-prefill dcp-size debug-tensor-dump-layers decode-log-interval default-priority-value "
    "detokenizer-worker-num disaggregation-bootstrap-port disaggregation-decode-polling-interval dist-timeout dp-size "
    "dwdp-size dynamic-batch-tokenizer-batch-size elastic-ep-scale-timeout encoder-bootstrap-port "
    "engine-info-bootstrap-port ep-num-redundant-experts ep-size eplb-rebalance-num-iterations "
    "expert-distribution-recorder-buffer-size gc-threshold gpu-id-step grpc-port hicache-size kt-cpuinfer "
    "kt-num-gpu-experts kt-threadpool-count kv-canary-sweep-interval linear-replayssm-cache-len "
    "load-snapshot-publish-interval mamba-cache-philox-rounds mamba-max-states-per-path mamba-track-interval "
    "max-loaded-loras max-lora-rank max-loras-per-batch max-mamba-cache-size max-queued-requests max-running-requests "
    "min-free-slots-delay mm-io-worker-num mm-processor-worker-num moe-dense-tp-size moe-dp-size nccl-port nnodes "
    "node-rank num-continuous-decode-steps num-reserved-decode-tokens numa-node offload-group-size "
    "offload-num-in-group offload-prefetch-step optimistic-prefill-attempts page-size port pp-async-batch-depth "
    "pp-max-micro-batch-size pp-size prefill-delayer-max-delay-passes prefill-max-requests "
    "priority-scheduling-preemption-threshold random-seed scheduler-recv-interval sm-group-num "
    "speculative-dflash-block-size speculative-draft-window-size speculative-dspark-block-size speculative-eagle-topk "
    "speculative-ngram-capacity speculative-ngram-external-corpus-max-tokens speculative-ngram-external-sam-budget "
    "speculative-ngram-max-bfs-breadth speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth "
    "speculative-num-draft-tokens speculative-num-steps stream-interval tokenizer-worker-num torch-compile-max-bs "
    "tp-size triton-attention-num-kv-splits triton-attention-split-tile-size weight-cache-timeout "
    "weight-loader-prefetch-num-threads",
    "float": "dynamic-batch-tokenizer-batch-timeout eplb-min-rebalancing-utilization-threshold "
    "gc-warning-threshold-secs hicache-ratio lora-drain-wait-threshold mamba-full-memory-ratio mem-fraction-static "
    "prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark "
    "schedule-conservativeness soft-watchdog-timeout speculative-accept-threshold-acc "
    "speculative-accept-threshold-single swa-full-tokens-ratio tbo-token-distribution-threshold watchdog-timeout",
    "json": "cuda-graph-config json-model-override-args",
}
"""The help of 0.5.17 shows neither types nor defaults; these are the types that its /server_info shows."""
FACTS: dict[str, dict[str, object]] = {
    "--mem-fraction-static": {"low": 0.0, "high": 1.0},
    "--port": {"low": 1.0, "high": 65535.0},
    "--swa-full-tokens-ratio": {"low": 0.0, "high": 1.0},
}
MODEL_TYPE = KnownFlag(name="--model-type", takes_value=True, type="str", text="which kind of server is started")
"""Read by `sglang serve` itself, so no parser lists it."""

FIXED_NAMES = {
    SERVES: "model-path model-type tokenizer-path tokenizer-mode served-model-name revision host port *api-key "
    "ssl-* enable-ssl-refresh fastapi-root-path smg-* grpc-* sidecar* is-embedding enable-multimodal *lora* "
    "weight-version config enable-http2 json-model-override-args limit-mm-data-per-request language-only encoder-only "
    "asr-* enable-streaming-session",
    PLACES: "nccl-port dist-init-addr nnodes node-rank base-gpu-id gpu-id-step device use-ray disaggregation-* "
    "encoder-* elastic-ep-* mooncake-ib-device engine-info-bootstrap-port decoupled-spec-*",
    ANSWERS: "chat-template hf-chat-template-name completion-template default-chat-template-kwargs tool-call-parser "
    "reasoning-parser strip-thinking-cache enable-strict-thinking sampling-defaults preferred-sampling-params "
    "allow-auto-truncate random-seed stream-response-default-include-usage incremental-streaming-output stream-output "
    "constrained-json-* enable-custom-logit-processor enable-return-* return-hidden-states-mode skip-tokenizer-init "
    "enable-cache-report speculative-accept-threshold-*",
    REFUSES: "max-queued-requests abort-on-priority-when-disabled",
    REACHES: "trust-remote-code download-dir tool-server load-format model-loader-extra-config custom-weight-loader "
    "remote-instance-* modelexpress-config modelopt-* quantize-and-serve delete-ckpt-after-loading decrypted-* "
    "file-storage-path crash-dump-folder export-metrics-to-file* debug-tensor-dump-* forward-hooks msprobe-* "
    "spec-trace-dir kv-events-config otlp-traces-endpoint enable-trace trace-modules weight-cache-socket warmups "
    "checkpoint-engine-* model-checksum rl-*",
    REPORTS: "help log-* uvicorn-* show-time-cost enable-metrics* tokenizer-metrics-* extra-metric-labels bucket-* "
    "prompt-tokens-buckets generation-tokens-buckets collect-tokens-histogram enable-request-time-stats-logging "
    "enable-forward-pass-metrics enable-mfu-metrics expert-distribution-recorder-* enable-expert-distribution-metrics "
    "skip-server-warmup watchdog-timeout soft-watchdog-timeout kv-canary* enable-layerwise-nvtx-marker "
    "enable-profile-cuda-graph",
}
"""Reason → names (with * for anything) of flags that no experiment may touch; a switch's negative goes with it."""
FIXED_ENV = {
    "SGLANG_HOST_IP": PLACES,
    "SGLANG_PORT": SERVES,
    "SGLANG_USE_MODELSCOPE": REACHES,
    "SGLANG_ALLOW_*": REACHES,
    "SGLANG_TEST_*": REACHES,
    "SGLANG_*RECORD*": REPORTS,
}
LIVE_STATE = "write the name of what it sets: the size of pipeline micro-batches, or one of the acceptance thresholds"
HOT = {
    "flush_cache": "emptying the cache is no setting: it belongs to a measurement",
    "set_internal_state": LIVE_STATE,
    "start_profile": "a profile slows the server down while it is taken",
    "update_weights": "it decides what is served, where and to whom, not how fast",
}
SETTABLE = frozenset(
    {"pp_max_micro_batch_size", "speculative_accept_threshold_single", "speculative_accept_threshold_acc"}
)
"""All that /set_internal_state takes (0.5.17). The thresholds change what is answered."""


class Sglang(python_server.PythonServer):
    """SGLang's command line and HTTP API."""

    engine: ClassVar[str] = "sglang"
    package: ClassVar[str] = "sglang"
    syntax: ClassVar[words.Syntax] = SYNTAX
    secret_flags: ClassVar[frozenset[str]] = frozenset({"--api-key", "--admin-api-key", "--ssl-keyfile-password"})
    env_prefixes: ClassVar[tuple[str, ...]] = ("SGLANG_", "SGL_", *ENV_PREFIXES)
    fixed_names: ClassVar[Mapping[str, str]] = FIXED_NAMES
    fixed_env: ClassVar[Mapping[str, str]] = FIXED_ENV
    default_port: ClassVar[int] = 30000
    certificate: ClassVar[str] = "--ssl-certfile"
    no_tcp: ClassVar[tuple[str, ...]] = ("--smg-grpc-mode", "--grpc-mode")
    looks: ClassVar[Mapping[str, str]] = {
        "health": "/health",
        "models": "/v1/models",
        "server_info": "/server_info",
        "get_server_info": "/get_server_info",
        "metrics": "/metrics",
    }
    hot: ClassVar[Mapping[str, str]] = HOT
    settable: ClassVar[frozenset[str]] = SETTABLE
    version_words: ClassVar[tuple[str, ...]] = ("version",)

    def help_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.help_command`."""
        return (*program, "--help")

    def parse_help(self, text: str) -> FlagTable:
        """See `ServerAdapter.parse_help`; `sglang serve --help` goes on with the flags of another server."""
        own = OTHER_HELP.split(text)[0]
        table = python_server.by_text(parse_help(own, self.engine), SIZE_TEXT, "size")
        table = python_server.completed(python_server.typed(table, TYPES), FACTS)
        more = {MODEL_TYPE.name: MODEL_TYPE} if MODEL_TYPE.name in own else {}
        return FlagTable(flags=table.flags | more)

    def apply(self, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
        """See `ServerAdapter.apply`."""
        return applied(self, spec, changes, known)

    def hot_setting(self, base_url: str, name: str, value: str, api_key_file: str | None = None) -> HotSetting | None:
        """See `ServerAdapter.hot_setting`; read back where the server shows its arguments as they are now."""
        if name not in SETTABLE:
            return None
        body = json.dumps({"server_args": {name: completions.number(value)}})
        request = HttpRequest(
            id="set",
            method="POST",
            url=f"{base_url}/set_internal_state",
            body=body,
            headers={"Content-Type": "application/json"},
            api_key_file=api_key_file,
        )
        reads = tuple(
            HttpRequest(id=path, url=f"{base_url}/{path}", api_key_file=api_key_file)
            for path in ("server_info", "get_server_info")
        )
        return HotSetting(request=request, reads=reads, where=("internal_states", "0", name))

    def is_loading(self, answer: HttpAnswer) -> bool:
        """503 without a word: so it answers from opening its port to the end of its warm-up, for 12 s (0.5.17)."""
        return answer.status == 503 and not answer.text.strip()

    def counters(self, answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
        """See `ServerAdapter.counters`; only with --enable-metrics."""
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
