"""What a running vLLM shows of itself, next to what it was asked for; pure, it asks nothing.

No endpoint of a production vLLM tells its configuration: /metrics shows the KV cache's, /v1/models the context. The
rest stands in the start log: what was asked (`non-default args`) and what came of it (`with config`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from state.models import LaunchSpec, canonical_json
from tools.servers import compare, completions
from tools.servers.base import HttpAnswer

COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
REQUESTS = "vllm:request_success_total"
"""Counts those that were broken off or failed, too, each under its own `finished_reason`."""

CACHE_LABELS = {
    "block_size": "--block-size",
    "cache_dtype": "--kv-cache-dtype",
    "enable_prefix_caching": "--enable-prefix-caching",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_offloading_backend": "--kv-offloading-backend",
    "kv_offloading_size": "--kv-offloading-size",
    "mamba_cache_mode": "--mamba-cache-mode",
    "num_gpu_blocks_override": "--num-gpu-blocks-override",
    "prefix_caching_hash_algo": "--prefix-caching-hash-algo",
    "kv_cache_size_tokens": "info:kv_cache_tokens",
    "num_gpu_blocks": "info:kv_cache_blocks",
}
"""Label of `vllm:cache_config_info` → what it tells."""

ENGINE_KEYS = {
    "data_parallel_size": "--data-parallel-size",
    "dcp_comm_backend": "--dcp-comm-backend",
    "decode_context_parallel_size": "--decode-context-parallel-size",
    "disable_custom_all_reduce": "--disable-custom-all-reduce",
    "dtype": "--dtype",
    "enable_chunked_prefill": "--enable-chunked-prefill",
    "enable_prefix_caching": "--enable-prefix-caching",
    "enforce_eager": "--enforce-eager",
    "kv_cache_dtype": "--kv-cache-dtype",
    "load_format": "--load-format",
    "max_seq_len": "--max-model-len",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "quantization": "--quantization",
    "seed": "--seed",
    "tensor_parallel_size": "--tensor-parallel-size",
    "tokenizer_mode": "--tokenizer-mode",
}
"""Key of the engine's `with config:` line → the flag that asks for it."""

ENGINE_LINE = re.compile(r"Initializing a V1 LLM engine \(v(\S+)\) with config: (.*)")
COMPILATION = {
    "mode": re.compile(r"'mode': <CompilationMode\.\w+: (\d)>"),
    "cudagraph_mode": re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+):"),
}
LOG_FACTS = {
    "--max-num-batched-tokens": re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)"),
    "--async-scheduling": re.compile(r"Asynchronous scheduling is (enabled|disabled)"),
    "--attention-backend": re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
    "--max-cudagraph-capture-size": re.compile(r"'max_cudagraph_capture_size': (\d+)"),
    "info:attention_refused": re.compile(r"Cannot use (?:AttentionBackendEnum\.)?(\w+) backend"),
    "info:kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
}
PREFIX = re.compile(r"^(\([\w -]+pid=\d+\) )?(INFO|WARNING|ERROR) [\d-]+ [\d:]+ (\[[\w./]+:\d+\] )?")
REMARK = re.compile(
    r"ignor|deprecat|disabl|not support|unsupported|fall(ing|s)? back|overrid|overwrit|duplicate keys|Cannot use"
    r"|Unknown vLLM environment|[Rr]educing|reset .* to|requires .*; using|leaving .* threads",
    re.IGNORECASE,
)


def in_flight(answers: Mapping[str, HttpAnswer]) -> int | None:
    """Requests running and waiting, over all engines behind the API."""
    found = completions.sums(answers, GAUGES)
    return int(sum(found.values())) if found else None


def effective(answers: Mapping[str, HttpAnswer], log: str) -> dict[str, str]:
    """From the start log, and from the answers, which are newer."""
    facts = _from_log(log)
    for _, labels, _ in completions.samples(answers, ("vllm:cache_config_info",)):
        told = {name: labels[label] for label, name in CACHE_LABELS.items() if labels.get(label, "None") != "None"}
        facts |= {name: _plain(value) for name, value in told.items()}
    model = completions.first_model(answers)
    told = {"--served-model-name": "id", "--max-model-len": "max_model_len", "info:model": "root"}
    facts |= {name: str(model[key]) for name, key in told.items() if model.get(key) is not None}
    version = completions.json_of(answers, "version").get("version")
    return facts | ({"info:version": str(version)} if version else {})


def mismatches(spec: LaunchSpec, shown: Mapping[str, str]) -> tuple[str, ...]:
    """Asked and not running, in words."""
    names = spec.flags.get("--served-model-name", ())
    told = {name: have for name, have in shown.items() if name != "--served-model-name" or have not in names}
    refused = shown.get("info:attention_refused")
    asked = " ".join(spec.flags.get("--attention-backend", ()))
    found = list(compare.differences(spec, told))
    if refused and asked.upper() == refused.upper():
        found.append(f"--attention-backend: asked {asked}, but it cannot be used here")
    if spec.flags.get("--speculative-config") and shown.get("info:speculative") == "None":
        found.append("--speculative-config: asked, but nothing speculates")
    return tuple(found)


def remarks(log: str) -> tuple[str, ...]:
    """What the server says of settings that it changes or ignores, once each: every process says it again."""
    lines = (line.strip() for line in log.splitlines() if "non-default args" not in line and "with config:" not in line)
    said = (PREFIX.sub("", line) for line in lines if PREFIX.match(line))
    return tuple(dict.fromkeys(text for text in said if REMARK.search(text)))


def _from_log(log: str) -> dict[str, str]:
    facts = {name: _plain(found[-1]) for name, pattern in LOG_FACTS.items() if (found := pattern.findall(log))}
    engine = ENGINE_LINE.findall(log)
    if not engine:
        return facts
    version, config = engine[-1]
    for key, name in ENGINE_KEYS.items():
        said = re.search(rf"(?<![\w']){key}=([^,()\s]+)", config)
        if said and said[1] != "None":
            facts[name] = _plain(said[1].removeprefix("torch."))
    compiled = {key: said[1] for key, pattern in COMPILATION.items() if (said := pattern.search(config))}
    if compiled:
        whole = {key: int(value) if value.isdigit() else value for key, value in compiled.items()}
        facts["--compilation-config"] = canonical_json(whole)
    speculative = re.search(r"speculative_config=(None|\w+\([^)]*\))", config)
    return facts | ({"info:speculative": speculative[1]} if speculative else {}) | {"info:version": version}


def _plain(value: str) -> str:
    """Numbers without thousands' commas, switches as on and off."""
    words = {"True": compare.ON, "enabled": compare.ON, "False": compare.OFF, "disabled": compare.OFF}
    return words.get(value, value.replace(",", "") if re.fullmatch(r"[\d,]+", value) else value)
