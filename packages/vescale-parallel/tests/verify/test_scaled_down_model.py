"""Scaled-down models of the sizes that are published: they run, and plans are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel import propose_sharding
from vescale_parallel._model.inputs import example_of
from vescale_parallel._verify.scaled_down_model import is_large, scaled_down

LARGEST_LLAMA = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

# The defaults of transformers choose no experts.
CHOSEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
}  # fmt: skip


def _published(family: str, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"])
def test_a_scaled_down_model_runs(family: str) -> None:
    model: Any = _published(family, **CHOSEN.get(family, {}))
    assert is_large(model)
    scaled: Any = scaled_down(model, 8)
    small = type(model)(scaled.config)
    assert sum(p.numel() for p in small.parameters()) < 1e8
    batch = example_of(small)
    assert batch is not None
    assert small(**batch).logits.isfinite().all()


def test_a_scaled_down_model_that_is_large_itself_is_not_scaled_again() -> None:
    model = _published("llama", **LARGEST_LLAMA)
    scaled = scaled_down(model, 2)
    assert scaled is not None
    assert is_large(scaled)
    plan = propose_sharding(model, "auto", 2).plan
    assert plan["model.layers.*.self_attn.q_proj.weight"] == "Shard(0)"
    assert plan["model.layers.*.mlp.down_proj.weight"] == "Shard(1)"
