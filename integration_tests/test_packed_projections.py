"""Projections that pack parts of several lengths, each sharded on its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import propose_sharding
from vescale_testing import World

from . import invariant_bits
from .families import VOCABULARY, hugging_face, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .sharded_layers import SIZES, compare
from .test_bad_input import check as check_refusal
from .training import whole


@dataclass(frozen=True)
class Sizes:
    width: int = 32
    num_heads: int = 8
    num_groups: int = 4


class Block(nn.Module):
    """Grouped queries in one projection, whose lengths are those of a configuration."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.head_dim = sizes, sizes.width // sizes.num_heads
        lengths = self.lengths()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, sum(lengths))
        self.out = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))

    def lengths(self) -> list[int]:
        heads, groups = self.sizes.num_heads, self.sizes.num_groups
        return [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(self.norm(x)).split(self.lengths(), dim=-1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in packed)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Blocks(nn.Module):
    def __init__(self, num_groups: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        sizes = Sizes(num_groups=num_groups)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MAMBA = {
    "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 4, "expand": 2, "conv_kernel": 4,
    "chunk_size": 8,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "phi3": {**SIZES, "num_attention_heads": 8},
    "mamba2": {**SIZES, **MAMBA},
    "qwen3_next": {
        **SIZES, "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "experts_implementation": "batched_mm",
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **SIZES, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 4, "chunk_size": 8,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    },
    "falcon_h1": {
        **SIZES, "head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4,
        "mamba_n_groups": 4, "mamba_chunk_size": 4, "mamba_d_ssm": 64,
        "ssm_multipliers": [0.3, 0.7, 1.3, 0.6, 1.7],
    },
    "gpt_bigcode": {
        **SIZES, "num_attention_heads": 8, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "falcon": {**SIZES, "num_attention_heads": 8, "num_kv_heads": 8, "bias": True},
    "few_key_heads": {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2},
}  # fmt: skip
TENSOR, BACKEND = "tensor_parallel", "compile_backend"
# Parameters that pack parts of several lengths, of a block.
PACKED: dict[str, dict[str, tuple[int, ...]]] = {
    "phi3": {"model.layers.*.self_attn.qkv_proj.weight": (32, 16, 16)},
    "mamba2": {
        "backbone.layers.*.mixer.in_proj.weight": (64, 64, 32, 32, 8),
        "backbone.layers.*.mixer.conv1d.weight": (64, 32, 32),
    },
    "qwen3_next": {"model.layers.*.linear_attn.conv1d.weight": (32, 32, 64)},
    "nemotron_h": {"model.layers.*.mixer.in_proj.weight": (64, 64, 32, 32, 8)},
    # A buffer of the same parts is multiplied by what the projection returns.
    "falcon_h1": {"model.layers.*.mamba.in_proj.weight": (64, 64, 16, 16, 8)},
    "by_hand": {"blocks.*.qkv.weight": (32, 16, 16)},
    "one_key_head": {"blocks.*.qkv.weight": (32, 8)},
    # One key-value head for all queries: keys and values behind each other are one part.
    "gpt_bigcode": {"transformer.h.*.attn.c_attn.weight": (32, 8)},
    "falcon": {"transformer.h.*.self_attention.query_key_value.weight": (32, 8)},
}
FAMILIES = list(PACKED)
# Of blocks written by hand.
NUM_GROUPS = {"by_hand": 4, "one_key_head": 1}


def build(family: str) -> nn.Module:
    torch.manual_seed(3)
    if family in NUM_GROUPS:
        return Blocks(NUM_GROUPS[family]).double()
    attention = "eager" if family == "mamba2" else "sdpa"
    name = {"few_key_heads": "phi3"}.get(family, family)
    return hugging_face(name, attention, **EXTRA[family]).double()


def placed(lengths: tuple[int, ...]) -> str:
    return f"InterleavedShard(0, {lengths})"


@pytest.mark.by_day("False-by_hand", "False-one_key_head", "False-gpt_bigcode")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequence", [False, True])
def test_each_of_their_parts_is_cut(family: str, sequence: bool) -> None:
    model = build(family)
    plan = propose_sharding(model, "auto", 2, sequence=sequence, example_batch=tokens()).plan
    assert {name: placed(each) for name, each in PACKED[family].items()}.items() <= plan.items()
    blocks = {n.replace(".0.", ".*.") for n, p in model.named_parameters() if p.dim() > 1}
    whole = {name for name in blocks if ".*." in name} - plan.keys()
    assert all(name.endswith("gate.weight") for name in whole)


@pytest.mark.slow
def test_key_heads_that_are_fewer_than_ranks_are_read_whole() -> None:
    plan = propose_sharding(build("few_key_heads"), "auto", 4, example_batch=tokens()).plan
    layer = "model.layers.*.self_attn.qkv_proj"
    # Queries of either key head, and both heads' keys and values behind each other.
    assert plan[f"{layer}.weight"] == "InterleavedShard(0, 3)"
    assert plan[f"{layer}.<read:weight>"] == "(Shard(0), Shard(0), Replicate())"


@pytest.mark.by_day("by_hand")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, family: str) -> None:
    compare(world2, build, family, {TP: 2})


PLANS: list[Constraints] = [
    {TP: 4, SEQUENCE: True},
    {TP: 2, DP: 2, ZERO: 3},
    {TP: 2, PP: 2, PARTS: 2},
]


@pytest.mark.by_day("by_hand-*'compile': 'blocks'*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "constraints"),
    [
        ("phi3", {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3}),
        ("mamba2", {TP: 4}),
        ("qwen3_next", {TP: 2, PP: 2, PARTS: 2}),
        ("gpt_bigcode", {TP: 4, SEQUENCE: True}),
        ("few_key_heads", {TP: 4}),
        ("falcon", {TP: 2, DP: 2, ZERO: 3, "recompute": "full"}),
        ("one_key_head", {TP: 2, DP: 2, ZERO: 1, "compile": "blocks", BACKEND: "aot_eager"}),
        ("by_hand", {TP: 2, DP: 2, ZERO: 1, "compile": "blocks", BACKEND: "aot_eager"}),
        *((family, plan) for family in FAMILIES for plan in PLANS),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, family: str, constraints: Constraints
) -> None:
    compare(world4, build, family, constraints)


def save(family: str, path: str, constraints: Constraints) -> None:
    model: Any = build(family)
    size = torch.distributed.get_world_size()
    plan = vescale.generate_plan(model, constraints, world_size=size, example_batch=tokens())
    vescale.save(path, {"model": vescale.parallelize(plan, model)})


def loaded(family: str, path: str, constraints: Constraints) -> dict[str, Tensor]:
    model: Any = build(family)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    size = torch.distributed.get_world_size()
    plan = vescale.generate_plan(model, constraints, world_size=size, example_batch=tokens())
    model = vescale.parallelize(plan, model)
    vescale.load(path, {"model": model})
    return {name: whole(each) for name, each in model.named_parameters()}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "mamba2", "falcon"])
def test_their_checkpoints_are_resharded(
    world2: World, world4: World, family: str, tmp_path: Path
) -> None:
    world4.run(save, family, str(tmp_path), {TP: 4})
    expected = dict(build(family).named_parameters())
    for found in world2.run(loaded, family, str(tmp_path), {DP: 2, ZERO: 3}):
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def generated(family: str, constraints: Constraints | None) -> Tensor:
    model: Any = build(family).eval()
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=tokens())
        model = vescale.parallelize(plan, model)
    return model.generate(tokens()["input_ids"], max_new_tokens=6, do_sample=False)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "gpt_bigcode"])
def test_models_with_them_generate(world2: World, family: str) -> None:
    expected = generated(family, None)
    assert all(torch.equal(each, expected) for each in world2.run(generated, family, {TP: 2}))


@pytest.mark.by_day("one_key_head-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "constraints"),
    [
        ("mamba2", {TP: 2, DP: 2}),
        ("one_key_head", {TP: 2, DP: 2}),
        ("few_key_heads", {TP: 4}),
    ],
    ids=str,
)
def test_what_their_layers_return_is_verified_part_by_part(
    family: str, constraints: Constraints
) -> None:
    plan = vescale.generate_plan(build(family), constraints, world_size=4, example_batch=tokens())
    batch = tokens() | {"labels": tokens()["input_ids"]}
    report = vescale.verify(plan, lambda: build(family), batch, steps=1)
    assert report.passed, str(report)


@pytest.mark.by_day("one_key_head")
@pytest.mark.parametrize("family", ["phi3", "one_key_head"])
def test_parts_of_a_plan_that_says_sizes_alone_are_verified(family: str) -> None:
    """How its matrices are packed is found by ``parallelize``, of which the plan says nothing."""
    batch = tokens() | {"labels": tokens()["input_ids"]}
    report = vescale.verify(make_plan({TP: 2}), lambda: build(family), batch, steps=1)
    assert report.passed, str(report)


def parallelized(text: str, **marks: str) -> list[int]:
    """Return the heads that blocks' own configurations have, and the model's, after a plan."""
    model = Blocks()
    shared = vars(model.blocks[0])["sizes"]
    texts = {
        "blocks.*.qkv.weight": text,
        **{f"blocks.*.qkv.<read:{name}>": said for name, said in marks.items()},
        "blocks.*.out.weight": "Shard(1)",
        "blocks.*.<attr:sizes.num_heads>": "Shard(0)",
        "blocks.*.<attr:sizes.num_groups>": "Shard(0)",
    }
    given = {TP: 2, f"{TENSOR}.sharding_policy": "manual", f"{TENSOR}.sharding_plan": texts}
    plan = vescale.generate_plan(model, given, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, model)
    own = [vars(block)["sizes"] for block in model.get_submodule("blocks").children()]
    return [sizes.num_heads for sizes in (*own, shared)]


@pytest.mark.slow
def test_a_configuration_is_divided_for_the_modules_that_read_it(world2: World) -> None:
    assert world2.run(parallelized, placed((32, 16, 16))) == [[4, 4, 8]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (placed((32, 16, 8)), "parts of 'blocks.0.qkv.weight' that are 64 long together"),
        (placed((31, 17, 16)), "each a multiple of tensor_parallel.size 2"),
        (placed((16, 32, 16)), "what it returns differs"),
        ("InterleavedShard(0, ())", r"or \(length, length, ...\)"),
    ],
)
def test_parts_that_are_not_those_of_the_code_are_refused(
    world2: World, text: str, message: str
) -> None:
    check_refusal(world2, ValueError, message, parallelized, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("(Shard(0), Replicate())", r"sharded in 2 parts.*'blocks.0.qkv.weight' is Interleaved"),
        ("(Shard(0), Shard(0), Replicate())", "needs an example to compare it"),
    ],
)
def test_parts_that_nothing_shows_to_be_read_whole_are_refused(
    world2: World, read: str, message: str
) -> None:
    text = placed((32, 16, 16))
    check_refusal(world2, ValueError, message, partial(parallelized, weight=read), text)


def wide() -> nn.Module:
    torch.manual_seed(3)
    sizes = {**EXTRA["phi3"], "hidden_size": 64, "vocab_size": invariant_bits.VOCABULARY}
    return hugging_face("phi3", "sdpa", **sizes).double()


@pytest.mark.nightly
@pytest.mark.slow
def test_chunks_of_parts_of_several_lengths_have_the_bits_of_any_number_of_ranks() -> None:
    said = invariant_bits.said_of(wide(), 2, sequence=True)
    assert said["model.layers.*.self_attn.qkv_proj.weight"] == placed((64, 32, 32))
    invariant_bits.compare_sizes(wide, said, 2, sequence=True, sizes=[2])


@pytest.mark.nightly
@pytest.mark.slow
def test_chunks_leave_attention_whole_of_which_parts_are_read_whole(world2: World) -> None:
    chunks: Constraints = {TP: 2, "numerics": "invariant", "numerics_chunks": 2}
    plan = vescale.generate_plan(build("falcon"), chunks, world_size=2, example_batch=tokens())
    names = {
        pattern.split(".")[3] for pattern in plan.tensor_parallel.sharding_plan if ".h." in pattern
    }
    assert names == {"mlp"}
    compare(world2, build, "falcon", chunks)
