"""Scaled-down models of the sizes that are published: they run, and plans are made of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from vescale_parallel import propose_sharding
from vescale_parallel._model.inputs import example_of
from vescale_parallel._trace.generators import states_of_generators
from vescale_parallel._verify.plan_of_scaled_down import plan_of_scaled_down
from vescale_parallel._verify.scaled_down_model import is_large, scaled_down

LARGEST_LLAMA: dict[str, Any] = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

LARGE_OPT = {
    "hidden_size": 9216, "ffn_dim": 36864, "num_hidden_layers": 4, "num_attention_heads": 24,
    "word_embed_proj_dim": 9216,
}  # fmt: skip
LARGE_FALCON = {
    "hidden_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 32, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
# The defaults of transformers choose no experts.
CHOSEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
}  # fmt: skip


def _published(family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe", "gptj"])
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
    model = _published("gptj", n_embd=16384, n_head=64, n_layer=4)
    scaled = scaled_down(model, 2)
    assert scaled is not None
    assert is_large(scaled)
    plan = propose_sharding(model, "auto", 2).plan
    assert plan["transformer.h.*.attn.q_proj.weight"] == "Shard(0)"
    assert plan["transformer.h.*.mlp.fc_out.weight"] == "Shard(1)"


@pytest.mark.by_day("opt-sizes2-model.decoder.layers.*.fc1.weight")
@pytest.mark.parametrize(
    ("family", "sizes", "cut"),
    [
        # The rotated features of a head are a number of their own.
        ("gptj", {}, "transformer.h.*.attn.q_proj.weight"),
        # The width of a head follows from others and cannot be set.
        ("falcon", LARGE_FALCON, "transformer.h.*.self_attention.query_key_value.weight"),
        # Embeddings are as wide as the hidden state, by a number of their own.
        ("opt", LARGE_OPT, "model.decoder.layers.*.fc1.weight"),
    ],
)
def test_published_sizes_are_scaled_down(family: str, sizes: dict[str, Any], cut: str) -> None:
    model = _published(family, **sizes)
    assert propose_sharding(model, "auto", 4).plan[cut] == "Shard(0)"


@pytest.mark.by_day("olmoe")
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_experts_in_bfloat16_are_sharded(family: str) -> None:
    """Of DeepSeek-V3 beside blocks without experts, which have another module of that name."""
    heads = 8
    model = _published(
        family, dtype=torch.bfloat16, num_attention_heads=heads, num_key_value_heads=heads
    )
    plan = propose_sharding(model, "auto", 2).plan
    assert plan["model.layers.*.mlp.experts.down_proj"] == "Shard(2)"


def test_what_is_between_layers_is_narrow_where_heads_have_a_width_of_their_own() -> None:
    llama = scaled_down(_published("llama", **LARGEST_LLAMA), 8)
    gptj = scaled_down(_published("gptj"), 8)
    assert llama is not None
    assert gptj is not None
    q_proj = llama.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert q_proj.shape == (128 * 8, 128 * 2)
    assert gptj.get_parameter("transformer.h.0.attn.q_proj.weight").shape == (16 * 8, 16 * 8)


def test_few_layers_have_every_type() -> None:
    types = [*["sliding_attention"] * 5, "full_attention"] * 4
    model = _published("gemma3_text", num_hidden_layers=24, layer_types=types)
    scaled: Any = scaled_down(model, 2)
    assert scaled is not None
    assert scaled.config.layer_types == types[:6]


def test_a_scaled_down_model_of_speech_has_an_example() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    with torch.device("meta"):
        model = WhisperForConditionalGeneration(WhisperConfig())
    scaled: Any = scaled_down(model, 2)
    assert scaled is not None
    small = type(model)(scaled.config)
    batch = example_of(small)
    assert batch is not None
    assert batch["input_features"].shape == (2, 80, 32)
    assert small(**batch).logits.isfinite().all()
    as_long: Any = scaled_down(model, 2, shorter=False)
    assert as_long.config.max_source_positions == 1500


def test_of_text_and_images_both_models_are_scaled_down() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig())
    scaled: Any = scaled_down(model, 2)
    assert scaled is not None
    assert sum(p.numel() for p in scaled.parameters()) < 3e7
    plan = propose_sharding(model, "auto", 2).plan
    assert plan["model.language_model.layers.*.self_attn.q_proj.weight"] == "Shard(0)"


@pytest.mark.by_day("7b")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "hidden"), [("mamba", 2560), ("falcon_mamba", 4096)], ids=["2.8b", "7b"]
)
def test_of_mixers_without_heads_channels_are_few(family: str, hidden: int) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 64,
        "time_step_rank": hidden // 16,
    }  # fmt: skip
    model = _published(family, **sizes)
    scaled = scaled_down(model, 8)
    assert scaled is not None
    assert sum(p.numel() for p in scaled.parameters()) < 1e6
    found = propose_sharding(model, "auto", 8)
    matrices = {f"mixer.{name}_proj.weight" for name in ("in", "x", "dt", "out")}
    assert {f"backbone.layers.*.{name}" for name in matrices} <= found.plan.keys()


PHI_4_MINI: dict[str, Any] = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "vocab_size": 200064,
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}


GRANITE_4: dict[str, Any] = {
    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
    "mamba_d_state": 128, "num_local_experts": 0, "vocab_size": 100352, "num_hidden_layers": 40,
    "layer_types": [*["linear_attention"] * 5, "full_attention"] * 6 + ["linear_attention"] * 4,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": GRANITE_4,
    "falcon_h1": {},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 6},
    "mamba2": {"num_hidden_layers": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("size", [2, 16])
def test_mixers_with_heads_are_narrow_and_as_wide_as_their_heads(family: str, size: int) -> None:
    """Forward says so: it would not run where sizes do not fit each other."""
    model: Any = _published(family, **HYBRIDS[family])
    scaled: Any = scaled_down(model, size)
    small = type(model)(scaled.config)
    assert sum(p.numel() for p in small.parameters()) < 1e8
    batch = example_of(small)
    assert batch is not None
    assert small(**batch).logits.isfinite().all()
    mixers = [m for name, m in small.named_modules() if name.endswith(("mamba", "mixer"))]
    mixer = next(m for m in mixers if hasattr(m, "conv_dim"))
    assert mixer.ssm_state_size == 2 * size
    assert mixer.num_heads * mixer.head_dim == mixer.intermediate_size


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid"])
def test_of_one_group_of_states_all_layers_of_the_model_itself_are_sharded(family: str) -> None:
    model = _published(family, **HYBRIDS[family])
    found = propose_sharding(model, "auto", 4)
    sharded = found.sharded_parameters(model)
    assert {name for name, p in model.named_parameters() if p.dim() > 1} <= sharded
    last: Any = [m for name, m in model.named_modules() if name.endswith("mamba")][-1]
    counted = [name for name in found.plan if name.endswith("mamba.<attr:conv_dim>")]
    assert {found.plan[name] for name in counted} == {"Shard(0) of conv1d.weight"}
    assert found.plan["model.layers.*.mamba.conv1d.weight"] == (
        f"InterleavedShard(0, {(last.intermediate_size, last.conv_dim - last.intermediate_size)})"
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_said_of_blocks_by_name_is_said_of_all_of_their_kind() -> None:
    """Of Nemotron-H, in which mixers, attention and MLPs have one name."""
    model = _published("nemotron_h", **HYBRIDS["nemotron_h"])
    plan = propose_sharding(model, "auto", 2).plan
    named = {n.removesuffix(".<attr:num_heads>") for n in plan if n.endswith("<attr:num_heads>")}
    assert named == {
        n for n, m in model.named_modules() if type(m).__name__.endswith("Mamba2Mixer")
    }


def test_what_is_said_of_one_block_of_several_alike_is_said_of_that_one() -> None:
    model = _published("llama", num_hidden_layers=6)
    scaled = scaled_down(model, 2)
    assert scaled is not None
    one = {"model.layers.2.mlp.<enter>": "Replicate()"}
    assert plan_of_scaled_down(one, scaled, model) == one
    every = {f"model.layers.{k}.mlp.<enter>": "Replicate()" for k in range(4)}
    assert len(plan_of_scaled_down(every, scaled, model)) == 6
    last = plan_of_scaled_down({"model.layers.3.<out>": "Shard(1) -> Replicate()"}, scaled, model)
    assert list(last) == ["model.layers.5.<out>"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "parameter", "lengths"),
    [
        ("phi3", PHI_4_MINI, "self_attn.qkv_proj", (3072, 1024, 1024)),
        ("mamba2", {"num_hidden_layers": 8}, "mixer.in_proj", (8192, 8192, 1024, 1024, 128)),
        ("nemotron_h", NEMOTRON_H, "mixer.in_proj", (8192, 8192, 1024, 1024, 128)),
    ],
    ids=["phi3", "mamba2", "nemotron_h"],
)
def test_parts_are_as_long_as_in_the_model_itself(
    family: str, sizes: dict[str, Any], parameter: str, lengths: tuple[int, ...]
) -> None:
    model = _published(family, **sizes)
    assert is_large(model)
    plan = propose_sharding(model, "auto", 2).plan
    said = {text for name, text in plan.items() if name.endswith(f".{parameter}.weight")}
    assert said == {f"InterleavedShard(0, {lengths})"}
    layout = dict(model.named_parameters())
    last = next(name for name in reversed(layout) if name.endswith(f"{parameter}.weight"))
    assert layout[last].shape[0] == sum(lengths)


class Drawing(transformers.LlamaForCausalLM):
    """Draws in its constructor, on the host whatever the device is (Wav2Vec2 does)."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Parameter(torch.Tensor(4).uniform_())
        self.first = random.random() + float(np.random.rand())


@pytest.mark.nightly
def test_what_a_constructor_draws_is_not_drawn_from_the_programs_generators() -> None:
    model = Drawing(transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64))
    before = states_of_generators()
    assert scaled_down(model, 2) is not None
    after = states_of_generators()
    assert torch.equal(before.torch, after.torch)
    assert not before.differs_outside_of_torch(after)
