"""The numbers of a host and of the running configuration that catalogue entries are fitted with: pure readings."""

from __future__ import annotations

from agent.catalogue.facts import CatalogueFacts

AUTO_SLOTS = 4
"""Slots that llama-server makes by itself, with a unified KV cache, when --parallel is absent or negative."""

PARALLEL = {
    "tp": ("--tp-size", "--tensor-parallel-size"),
    "dp": ("--dp-size", "--data-parallel-size"),
    "ep": ("--ep-size", "--expert-parallel-size"),
}
"""Degrees of parallelism, by the spellings of the engines; 1 where nothing is stated."""
RUNNING = ("--max-running-requests", "--max-num-seqs")
STEP_TOKENS = ("--chunked-prefill-size", "--max-num-batched-tokens")
SPECULATES = frozenset({"--speculative-algorithm", "--speculative-config", "--spec-method", "--spec-model"})


def numbers(facts: CatalogueFacts) -> dict[str, float]:
    """The names that values and conditions use; what the parent leaves to the server is absent.

    `ctx_per_slot` is the longest context of one request: llama-server divides --ctx-size by the slots, unless they
    share one (`unified`). `running` is the bound on requests in one batch, `step_tokens` that on tokens in one step,
    both only where the parent states them. `sm` is the compute capability of the GPUs times ten, 0 without one.
    """
    threads = _number(facts, "--threads")
    slots, unified = _slots(facts)
    context = _number(facts, "--ctx-size")
    found = {
        "cores": facts.cores,
        "half_cores": max(1, facts.cores // 2),
        "spare_cores": max(1, facts.cores - 1),
        "gpus": facts.gpus,
        "sm": facts.sm if facts.gpus else 0,
        "mem_available_mb": facts.mem_available_mb,
        "threads": threads,
        "threads_batch": _number(facts, "--threads-batch") or threads,
        "slots": slots,
        "unified": int(unified),
        "ctx_per_slot": context if context is None or unified else context // slots,
        "quantised_v": int(facts.flags.get("--cache-type-v", ("f16",))[-1:] not in (("f32",), ("f16",), ("bf16",))),
        "flash_attn_off": int(facts.flags.get("--flash-attn") == ("off",)),
        "running": _number(facts, *RUNNING),
        "step_tokens": _number(facts, *STEP_TOKENS),
        "speculates": int(bool(SPECULATES & facts.flags.keys())),
        **{name: _number(facts, *spellings) or 1 for name, spellings in PARALLEL.items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def _slots(facts: CatalogueFacts) -> tuple[int, bool]:
    asked = _number(facts, "--parallel")
    if "--no-kv-unified" in facts.flags and asked is not None:
        return asked, False
    return asked or AUTO_SLOTS, asked is None or "--kv-unified" in facts.flags


def _number(facts: CatalogueFacts, *flags: str) -> int | None:
    """The first flag's positive number; None when it is absent, or 0 or less, which leave the choice to the server."""
    values = next((facts.flags[flag] for flag in flags if flag in facts.flags), ())
    try:
        value = int(values[-1]) if values else 0
    except ValueError:
        return None
    return value if value > 0 else None
