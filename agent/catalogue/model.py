"""From a model's `config.json` to what the catalogue asks about models: pure, it reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.catalogue.entries import ModelTrait

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
FORMATS: dict[str, ModelTrait] = {"nvfp4": "fp4", "mxfp4": "fp4", "fp4": "fp4", "fp8": "fp8", "awq": "awq"}


def traits(config: Mapping[str, Any]) -> frozenset[ModelTrait]:
    """What the model is; a multimodal model is what its text part is."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    found: set[ModelTrait] = set()
    if any(_positive(inner, name, 1) for name in EXPERTS):
        found.add("moe")
    if _positive(inner, "kv_lora_rank", 0):
        found.add("mla")
    if any(_positive(inner, name, 0) for name in DRAFT_LAYERS):
        found.add("mtp")
    quantised = config.get("quantization_config") or inner.get("quantization_config")
    # The method names the tool, the algorithm (where there is one) the format.
    words = str(quantised).lower() if isinstance(quantised, Mapping) else ""
    name = next((name for name in FORMATS if name in words), None)
    return frozenset(found | ({FORMATS[name]} if name else set()))


def _positive(config: Mapping[str, Any], name: str, above: int) -> bool:
    value = config.get(name)
    return isinstance(value, int) and value > above
