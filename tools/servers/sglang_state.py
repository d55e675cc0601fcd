"""What a running SGLang shows of itself, next to what it was asked for; pure, it asks nothing.

/server_info (before 0.5.6: /get_server_info) tells every argument as the server resolved it, the API keys included:
those are never read. The start log tells the same for a server that does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from state.models import LaunchSpec
from tools.servers import compare, completions
from tools.servers.base import HttpAnswer

COUNTERS = ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:realtime_tokens_total")
REQUESTS = "sglang:num_requests_total"
GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
"""Not `sglang:http_requests_active`: it stood at 254 on an idle server (0.5.17), after a load of 256 streams."""

SECRET = re.compile(r"api_key|password|token$")
OTHER_NAMES = {
    "bf16_gemm_runner_backend": "--bf16-gemm-backend",
    "ep_join_rank_offset": "--elastic-ep-join-rank-offset",
    "fp4_gemm_runner_backend": "--fp4-gemm-backend",
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
}
"""Arguments that do not carry the name of their flag."""

ARGUMENTS = re.compile(r"server_args=ServerArgs\((.*)")
ARGUMENT = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\[[^\[\]]*\]|[^,()\[\]{}\s]+)(?=, \w+=|\)|$)")
CAPACITY = re.compile(r"max_total_num_tokens=(\d+),.* max_running_requests=(\d+), context_len=(\d+)")
STAMP = re.compile(r"^\[[\d: -]+(?: \w+)*\] ")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
REMARK = re.compile(
    r"ignor|deprecat|disabled|not support|unsupported|falls? back|falling back|overrid|overwrit|adjust|reduc|is set to"
    r"|auto-resolved|not specified",
    re.IGNORECASE,
)
NOISE = re.compile(r"Endpoint '|FastAPI|Ignore import error|server_args=|(Prefill|Decode) batch")


def in_flight(answers: Mapping[str, HttpAnswer]) -> int | None:
    """Requests running and waiting. Ranks of one replica say the same, so the largest counts; replicas add up."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in completions.samples(answers, GAUGES):
        replica = (name, labels.get("dp_rank", ""))
        found[replica] = max(found.get(replica, 0.0), value)
    return int(sum(found.values())) if found else None


def effective(answers: Mapping[str, HttpAnswer], log: str) -> dict[str, str]:
    """From the server's own account, else from the start log."""
    told = completions.json_of(answers, "server_info") or completions.json_of(answers, "get_server_info")
    facts = _from_answer(told) if told else _from_log(log)
    model = completions.first_model(answers)
    return facts | ({"info:model": str(model["root"])} if model.get("root") else {})


def mismatches(spec: LaunchSpec, shown: Mapping[str, str]) -> tuple[str, ...]:
    """Asked and not running, in words; a model may be asked for by another name than that of its folder."""
    named = ("--model-path", "--tokenizer-path")
    return tuple(compare.differences(spec, {name: have for name, have in shown.items() if name not in named}))


def remarks(log: str) -> tuple[str, ...]:
    """What the server says of settings that it chose, changed or ignores, once each."""
    said = (STAMP.sub("", COLOUR.sub("", line).strip()) for line in log.splitlines())
    return tuple(dict.fromkeys(text for text in said if REMARK.search(text) and not NOISE.search(text)))


def _flag(key: str) -> str:
    return OTHER_NAMES.get(key, f"--{key.replace('_', '-')}")


def _from_answer(told: Mapping[str, Any]) -> dict[str, str]:
    states = told.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    arguments = {key: value for key, value in {**told, **state}.items() if not SECRET.search(key)}
    flat = {_flag(key): compare.shown_value(value) for key, value in arguments.items() if not isinstance(value, list)}
    flat |= _cuda_graphs(told.get("cuda_graph_config"))
    running = state.get("effective_max_running_requests_per_dp")
    if isinstance(running, int):
        flat["--max-running-requests"] = str(running * int(told.get("dp_size") or 1))
    pool = told.get("max_total_num_tokens")
    flat |= {"--max-total-tokens": compare.shown_value(pool), "info:version": compare.shown_value(told.get("version"))}
    return {name: value for name, value in flat.items() if value is not None and name not in NOT_FLAGS}


NOT_FLAGS = frozenset({"--internal-states", "--memory-usage", "--startup-time", "--version", "--cuda-graph-config"})


def _cuda_graphs(config: object) -> dict[str, str | None]:
    """The nested configuration under the flags that set its parts."""
    found: dict[str, str | None] = {}
    for phase in ("decode", "prefill"):
        part = config.get(phase) if isinstance(config, dict) else None
        if isinstance(part, dict):
            found[f"--cuda-graph-backend-{phase}"] = compare.shown_value(part.get("backend"))
            found[f"--cuda-graph-max-bs-{phase}"] = compare.shown_value(part.get("max_bs"))
            found[f"--cuda-graph-bs-{phase}"] = compare.shown_value(part.get("bs"))
    return found


def _from_log(log: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    arguments = ARGUMENTS.findall(log)
    for key, value in ARGUMENT.findall(arguments[-1]) if arguments else ():
        if value != "None" and not value.startswith("[") and not SECRET.search(key):
            facts[_flag(key)] = {"True": compare.ON, "False": compare.OFF}.get(value, value.strip("'"))
    capacity = CAPACITY.findall(log)
    if capacity:
        facts |= dict(
            zip(("--max-total-tokens", "--max-running-requests", "--context-length"), capacity[-1], strict=True)
        )
    return facts
