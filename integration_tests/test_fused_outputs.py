"""Blocks whose attention and MLP share one output matrix: ``out(cat([attention, mlp], -1))``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import compile_report, propose_sharding
from vescale_testing import World

from .families import tokens
from .invariant_bits import VOCABULARY, compare_sizes, said_of
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import compare
from .test_bad_input import check as check_refusal
from .training import whole

WIDTH, HEADS, HIDDEN = 32, 4, 64
HEAD = WIDTH // HEADS
COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention without a matrix of its own for what it returns."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, key_heads * HEAD), nn.Linear(WIDTH, key_heads * HEAD)
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm_q(self.q(x).unflatten(-1, (-1, HEAD))).flatten(2)
        k = self.norm_k(self.k(x).unflatten(-1, (-1, HEAD))).flatten(2)
        return attend(q, k, self.v(x))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Single(nn.Module):
    """As single-stream blocks of FLUX, Chroma and HunyuanVideo, with a gate of each feature."""

    def __init__(self, key_heads: int = HEADS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), Gate()
        self.attn, self.up = Attention(key_heads), nn.Linear(WIDTH, hidden)
        self.act, self.out = nn.GELU(), nn.Linear(WIDTH + hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        both = torch.cat([self.attn(h), self.act(self.up(h))], dim=2)
        return x + self.gate(self.out(both))


class Grouped(Single):
    """Keys of fewer heads."""

    def __init__(self) -> None:
        super().__init__(key_heads=2)


class Equal(Single):
    """Parts of one length."""

    def __init__(self) -> None:
        super().__init__(hidden=WIDTH)


class Fused(nn.Module):
    """As single-stream blocks of FLUX.2: queries, keys, values, gate and up in one matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj_in = nn.Linear(WIDTH, 3 * WIDTH + 2 * HIDDEN, bias=False)
        self.proj_out = nn.Linear(WIDTH + HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.proj_in(self.norm(x))
        ours = packed.shape[-1] * 3 * WIDTH // (3 * WIDTH + 2 * HIDDEN)
        qkv, mlp = packed.split([ours, packed.shape[-1] - ours], dim=-1)
        gate, up = mlp.chunk(2, dim=-1)
        both = torch.cat([attend(*qkv.chunk(3, dim=-1)), F.silu(gate) * up], dim=-1)
        return x + self.proj_out(both)


class Apart(nn.Module):
    """As ViT-22B: one matrix for what attention and MLP read, one each for what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [3 * WIDTH, HIDDEN]
        self.norm, self.proj_in = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, sum(self.lengths))
        self.attn_out, self.mlp_out = nn.Linear(WIDTH, WIDTH), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, mlp = self.proj_in(self.norm(x)).split(self.lengths, dim=-1)
        return x + self.attn_out(attend(*qkv.chunk(3, dim=-1))) + self.mlp_out(F.gelu(mlp))


class OneKeyHead(nn.Module):
    """As PaLM: all heads have one key and one value, which every rank computes."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = (WIDTH, HEAD, HEAD, 2 * HIDDEN)
        self.norm, self.proj_in = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, sum(self.lengths))
        self.attn_out, self.mlp_out = nn.Linear(WIDTH, WIDTH), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, mlp = self.proj_in(self.norm(x)).split(self.lengths, dim=-1)
        up, gate = mlp.chunk(2, dim=-1)
        return x + self.attn_out(attend(q, k, v)) + self.mlp_out(F.silu(gate) * up)


class Odd(Single):
    """Three heads, which two ranks do not share: all of it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.q = nn.Linear(WIDTH, 3 * HEAD)
        self.attn.k, self.attn.v = nn.Linear(WIDTH, 3 * HEAD), nn.Linear(WIDTH, 3 * HEAD)
        self.out = nn.Linear(3 * HEAD + HIDDEN, WIDTH)


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


KINDS: dict[str, type[nn.Module]] = {
    "single": Single,
    "grouped": Grouped,
    "equal": Equal,
    "fused": Fused,
    "apart": Apart,
    "one_key_head": OneKeyHead,
    "odd": Odd,
}
# What their packed matrices are sharded as.
PACKED: dict[str, dict[str, str]] = {
    "single": {"out": "InterleavedShard(1, (32, 64))"},
    "grouped": {"out": "InterleavedShard(1, (32, 64))"},
    "equal": {"out": "InterleavedShard(1, 2)"},
    "fused": {
        "proj_in": "InterleavedShard(0, (32, 32, 32, 64, 64))",
        "proj_out": "InterleavedShard(1, (32, 64))",
    },
    "apart": {
        "proj_in": "InterleavedShard(0, (32, 32, 32, 64))",
        "attn_out": "Shard(1)",
        "mlp_out": "Shard(1)",
    },
    "one_key_head": {
        "proj_in": "InterleavedShard(0, (32, 16, 64, 64))",
        "attn_out": "Shard(1)",
        "mlp_out": "Shard(1)",
    },
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Blocks(KINDS[name]).double()


def proposed(name: str, size: int = 2, **options: Any) -> dict[str, str]:
    model = build(name)
    return dict(propose_sharding(model, "auto", size, example_batch=tokens(), **options).plan)


@pytest.mark.by_day(
    "grouped-False", "equal-False", "fused-True", "apart-False", "one_key_head-False"
)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_each_of_their_parts_is_sharded(name: str, sequence: bool) -> None:
    plan = proposed(name, sequence=sequence)
    expected = {f"blocks.*.{layer}.weight": text for layer, text in PACKED[name].items()}
    assert expected.items() <= plan.items()
    blocks = {n.replace(".0.", ".*.") for n, p in build(name).named_parameters() if p.dim() > 1}
    assert {each for each in blocks if ".*." in each} <= plan.keys()


def test_an_example_of_one_token_says_nothing_against_norms_of_queries() -> None:
    example = {name: torch.zeros_like(each) for name, each in tokens().items()}
    plan = propose_sharding(build("single"), "auto", 2, example_batch=example).plan
    assert plan["blocks.*.attn.q.weight"] == "Shard(0)"
    assert plan["blocks.*.attn.norm_q.weight.<grad>"] == "Partial()"


def test_heads_that_do_not_divide_keep_the_matrix_whole() -> None:
    assert not any(".out." in pattern or ".attn." in pattern for pattern in proposed("odd"))


CI: list[tuple[str, Constraints]] = [
    ("single", {TP: 2}),
    ("fused", {TP: 2, SEQUENCE: True}),
    ("apart", {TP: 2, "recompute": "full"}),
    ("one_key_head", {TP: 2, **COMPILED}),
]
REST: list[tuple[str, Constraints]] = [
    (name, plan)
    for name in KINDS
    for plan in (
        {TP: 2},
        {TP: 2, SEQUENCE: True},
        {TP: 2, **COMPILED},
        {TP: 2, "recompute": "full"},
        {TP: 2, "tensor_parallel.overlap": 2},
    )
    if (name, plan) not in CI and (name != "odd" or SEQUENCE not in plan)
]


@pytest.mark.by_day("fused-*", "apart-*")
@pytest.mark.parametrize(("name", "plan"), CI, ids=str)
def test_two_ranks_have_the_losses_and_gradients_of_one(
    world2: World, name: str, plan: Constraints
) -> None:
    compare(world2, build, name, plan)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "plan"), REST, ids=str)
def test_two_ranks_have_them_under_other_plans(
    world2: World, name: str, plan: Constraints
) -> None:
    compare(world2, build, name, plan)


@pytest.mark.by_day(
    "fused-{'tensor_parallel.size': 2, 'data_parallel.size': 2, 'data_parallel.zero_stage': 3}*"
)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("single", {TP: 2, PP: 2, PARTS: 2}),
        ("fused", {TP: 2, DP: 2, ZERO: 3}),
        ("equal", {TP: 4, SEQUENCE: True}),
        *(
            (name, plan)
            for name in KINDS
            for plan in (
                {TP: 4},
                {TP: 4, SEQUENCE: True},
                {TP: 2, PP: 2, PARTS: 2},
                {TP: 2, DP: 2, ZERO: 3, SEQUENCE: True},
            )
            if name != "odd" or SEQUENCE not in plan
        ),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, name: str, plan: Constraints
) -> None:
    compare(world4, build, name, plan)


def graphs_and_breaks(name: str) -> list[tuple[int, tuple[str, ...]]]:
    given = {TP: 2, **COMPILED}
    plan = vescale.generate_plan(build(name), given, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, build(name))
    model(**tokens()).backward()
    return [(block.num_graphs, block.breaks) for block in compile_report(model).values()]


@pytest.mark.nightly
def test_compiled_blocks_have_one_graph(world2: World) -> None:
    for found in world2.run(graphs_and_breaks, "single"):
        assert found == [(1, ())] * 2


def save(path: str, constraints: Constraints) -> None:
    model: Any = build("fused")
    size = torch.distributed.get_world_size()
    plan = vescale.generate_plan(model, constraints, world_size=size, example_batch=tokens())
    vescale.save(path, {"model": vescale.parallelize(plan, model)})


def loaded(path: str, constraints: Constraints) -> dict[str, Tensor]:
    model: Any = build("fused")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    size = torch.distributed.get_world_size()
    plan = vescale.generate_plan(model, constraints, world_size=size, example_batch=tokens())
    model = vescale.parallelize(plan, model)
    vescale.load(path, {"model": model})
    return {name: whole(each) for name, each in model.named_parameters()}


def test_their_checkpoints_are_resharded(world2: World, world4: World, tmp_path: Path) -> None:
    world4.run(save, str(tmp_path), {TP: 4})
    expected = dict(build("fused").named_parameters())
    for plan in ({TP: 2}, {DP: 2, ZERO: 3}):
        for found in world2.run(loaded, str(tmp_path), plan):
            assert all(torch.equal(found[name], each) for name, each in expected.items())


BY_HAND: dict[str, dict[str, str]] = {
    "single": {
        "attn.q.weight": "Shard(0)",
        "attn.k.weight": "Shard(0)",
        "attn.v.weight": "Shard(0)",
        "attn.norm_q.weight.<grad>": "Partial()",
        "attn.norm_k.weight.<grad>": "Partial()",
        "up.weight": "Shard(0)",
        "out.weight": "InterleavedShard(1, (32, 64))",
    },
    "apart": {
        "proj_in.weight": "InterleavedShard(0, (32, 32, 32, 64))",
        "<attr:lengths>": "Shard(0) of proj_in.weight",
        "attn_out.weight": "Shard(1)",
        "mlp_out.weight": "Shard(1)",
    },
}


def by_hand(name: str, **said: str) -> tuple[float, dict[str, Tensor]]:
    texts = {**BY_HAND[name], **said}
    given = {
        TP: 2,
        "tensor_parallel.sharding_policy": "manual",
        "tensor_parallel.sharding_plan": {f"blocks.*.{p}": text for p, text in texts.items()},
    }
    plan = vescale.generate_plan(build(name), given, world_size=2, example_batch=tokens())
    model: Any = vescale.parallelize(plan, build(name))
    loss = model(**tokens())
    loss.backward()
    return float(loss.detach()), {n: whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_plan_written_by_hand_says_it(world2: World, name: str) -> None:
    model: Any = build(name)
    loss = model(**tokens())
    loss.backward()
    for found, grads in world2.run(by_hand, name):
        # In float64 ranks add up the terms of a product in another order, no more.
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        for parameter, each in model.named_parameters():
            torch.testing.assert_close(grads[parameter], each.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("single", {"out.weight": "Shard(1)"}, "one rank's part does not run"),
        (
            "single",
            {"out.weight": "InterleavedShard(1, (64, 32))"},
            "in 'blocks.0', what it returns differs",
        ),
        (
            "single",
            {"out.weight": "InterleavedShard(1, (32, 40))"},
            "parts of 'blocks.0.out.weight' that are 96 long",
        ),
        (
            "apart",
            {"proj_in.weight": "InterleavedShard(0, (64, 32, 64))"},
            "in 'blocks.0', what it returns differs",
        ),
        (
            "apart",
            {"<attr:lengths>": "Shard(0) of mlp_out.weight"},
            r"expected blocks.0.lengths to be the lengths of parts 1 of what is sharded, got \[96",
        ),
    ],
)
def test_parts_that_are_not_those_of_the_code_are_refused(
    world2: World, name: str, said: dict[str, str], message: str
) -> None:
    check_refusal(world2, ValueError, message, partial(by_hand, **said), name)


@pytest.mark.by_day("fused-False", "single-True")
@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("fused", False),
        ("single", True),
        *(
            (name, sequence)
            for name in PACKED
            for sequence in (False, True)
            if name != "one_key_head"
            and (name, sequence) not in (("fused", False), ("single", True))
        ),
    ],
)
def test_chunks_have_the_bits_of_any_number_of_ranks(name: str, sequence: bool) -> None:
    said = said_of(build(name), 2, sequence=sequence)
    placed = {f"blocks.*.{layer}.weight": text for layer, text in PACKED[name].items()}
    assert placed.items() <= said.items()
    compare_sizes(lambda: build(name), said, 2, sequence=sequence, sizes=[2])
