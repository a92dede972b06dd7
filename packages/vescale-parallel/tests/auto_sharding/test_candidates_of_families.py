from __future__ import annotations

import functools
from typing import Any, cast

import pytest
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel import propose_sharding
from vescale_parallel._auto_sharding.find_candidates import Candidate, Candidates
from vescale_parallel._tensor_parallel.read_by_forward.arguments import ArgumentSlice

from .candidate_checks import assert_certified, features, found
from .families import build


@functools.cache
def family(name: str) -> Candidates:
    return found(*build(name))


def cut_of(name: str, parameter: str) -> Candidate:
    [cut] = [cut for cut in family(name).chosen if parameter in cut.parameters]
    return cut


def test_llama_is_cut_by_key_heads_features_and_vocabulary() -> None:
    attention = cut_of("llama", "model.layers.0.self_attn.k_proj.weight")
    assert attention.length == 2
    assert attention.exits == ("model.layers.0.self_attn.o_proj",)
    assert cut_of("llama", "model.layers.1.mlp.up_proj.weight").length == 96
    assert cut_of("llama", "lm_head.weight").kind == "vocabulary"
    assert cut_of("llama", "model.embed_tokens.weight").exits == ("model.embed_tokens",)


def test_gpt2_is_cut_through_its_transposed_linears() -> None:
    cut = cut_of("gpt2", "transformer.h.0.attn.c_attn.weight")
    assert cut.parameters == {
        "transformer.h.0.attn.c_attn.weight": InterleavedShard(1, 3),
        "transformer.h.0.attn.c_attn.bias": InterleavedShard(0, 3),
        "transformer.h.0.attn.c_proj.weight": Shard(0),
    }


def test_bert_has_a_cut_for_each_attention_and_each_mlp() -> None:
    assert len(features(family("bert"))) == 4


def test_the_relative_bias_of_t5_is_cut_by_the_heads_of_all_blocks() -> None:
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cut = cut_of("t5", bias)
    assert cut.parameters[bias] == Shard(1)
    assert "encoder.block.1.layer.0.SelfAttention.q.weight" in cut.parameters
    assert not any(name.startswith("decoder") for name in cut.parameters)


def test_opt_is_cut_but_for_its_positions() -> None:
    assert cut_of("opt", "model.decoder.layers.0.fc1.weight").length == 96
    names = {name for cut in family("opt").chosen for name in cut.parameters}
    assert "model.decoder.embed_positions.weight" not in names


def test_latent_attention_sums_gradients_before_its_shared_key() -> None:
    cut = cut_of("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight")
    base = "model.layers.0.self_attn"
    assert cut.entries == (f"{base}.kv_a_proj_with_mqa", f"{base}.q_b_proj")
    assert cut.replicated == (
        f"{base}.kv_a_layernorm.weight",
        f"{base}.kv_a_proj_with_mqa.weight",
    )


def test_biases_by_head_that_are_no_parameters_are_sliced() -> None:
    cut = cut_of("bloom", "transformer.h.0.self_attention.query_key_value.weight")
    assert cut.length == 4
    assert cut.slices == {
        ("transformer.h.0.self_attention", "alibi"): ArgumentSlice(0, each_row=True)
    }


def test_what_one_block_of_t5_makes_for_the_others_is_no_argument_to_take_parts_of() -> None:
    cuts = [
        cut_of("t5", f"decoder.block.{block}.layer.1.EncDecAttention.q.weight") for block in (0, 1)
    ]
    assert not any(cut.slices for cut in cuts)
    model, batch = build("t5")
    plan = propose_sharding(model, "auto", 2, example_batch=batch).plan
    assert plan["decoder.block.*.layer.1.EncDecAttention.q.weight"] == "Shard(0)"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "opt", "mixtral"])
def test_families_are_certified(name: str) -> None:
    model, batch = build(name)
    if hasattr(model, "set_experts_implementation"):
        cast(Any, model).set_experts_implementation("eager")
    assert_certified(model, batch, family(name))
