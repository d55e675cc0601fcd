"""What a model is, read from the keys that public models have in their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from agent.catalogue.model import traits


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 36}, set()),
        ({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}, {"moe"}),
        ({"model_type": "mixtral", "num_local_experts": 8}, {"moe"}),
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 256,
                "kv_lora_rank": 512,
                "num_nextn_predict_layers": 1,
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
            {"moe", "mla", "mtp", "fp8"},
        ),
        (
            {
                "text_config": {"num_experts": 512, "mtp_num_hidden_layers": 1},
                "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            },
            {"moe", "mtp", "fp4"},
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {"awq"}),
        ({"num_experts": 1, "kv_lora_rank": None, "num_nextn_predict_layers": 0}, set()),
        ({}, set()),
    ],
)
def test_traits(config: dict[str, Any], expected: set[str]) -> None:
    assert traits(config) == expected
