"""Layers that take their width from the input: ``B, T, C = x.shape``, then ``y.view(B, T, C)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import compile_report, explain, propose_sharding
from vescale_testing import World

from .families import VOCABULARY, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import compare

WIDTH = 32
COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}


class Causal(nn.Module):
    """As nanoGPT attends."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = 4, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Image(nn.Module):
    """As DINO and MAE attend."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.scale = 4, (WIDTH // 4) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(y)


class Biased(nn.Module):
    """As BEiT attends: biases of queries and values, a buffer for keys, a bias of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias = nn.Parameter(torch.randn(WIDTH))
        self.v_bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("k_bias", torch.randn(WIDTH), persistent=False)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.proj, self.num_heads = nn.Linear(WIDTH, WIDTH), 4

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        bias = torch.cat((self.q_bias, self.get_buffer("k_bias"), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias)
        qkv = qkv.reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        places = torch.arange(N, device=x.device)
        near = self.table[(places[:, None] - places).abs().clamp(max=4)].permute(2, 0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=near[None])
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Scaled(Causal):
    """Scales by the whole width, which a rank's is not: stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.shape[-1] ** -0.5


KINDS: dict[str, type[nn.Module]] = {"causal": Causal, "image": Image, "biased": Biased}


class Blocks(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Blocks(KINDS.get(name, Scaled)).double()


def proposed(name: str, **options: Any) -> dict[str, str]:
    return dict(propose_sharding(build(name), "auto", 2, example_batch=tokens(), **options).plan)


@pytest.mark.by_day("biased-False")
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_their_attention_is_sharded(name: str, sequence: bool) -> None:
    plan = proposed(name, sequence=sequence)
    packed = "c_attn" if name == "causal" else "qkv"
    assert plan[f"blocks.*.attn.{packed}.weight"] == "InterleavedShard(0, 3)"
    assert plan["blocks.*.attn.<shape>"] == "Shard(-1)"
    if name == "biased":
        assert plan["blocks.*.attn.<read:k_bias>"] == "Shard(0)"
        assert plan["blocks.*.attn.table"] == "Shard(1)"


def test_a_whole_width_that_code_computes_with_is_not_a_shards() -> None:
    assert not any("attn" in pattern for pattern in proposed("scaled"))


def explained(name: str) -> str:
    plan = vescale.generate_plan(build(name), {TP: 2}, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, build(name))
    with explain(model) as explanation:
        model(**tokens())
    return str(explanation)


def test_explain_says_where_code_reads_the_shape_of_a_shard(world2: World) -> None:
    assert "the shape of its input as of a rank's shard" in world2.run(explained, "causal")[0]


def graphs_and_breaks(name: str) -> list[tuple[int, tuple[str, ...]]]:
    given = {TP: 2, **COMPILED}
    plan = vescale.generate_plan(build(name), given, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, build(name))
    model(**tokens()).backward()
    return [(block.num_graphs, block.breaks) for block in compile_report(model).values()]


@pytest.mark.by_day("causal")
@pytest.mark.parametrize("name", ["causal", "biased"])
def test_compiled_blocks_have_one_graph(world2: World, name: str) -> None:
    for found in world2.run(graphs_and_breaks, name):
        assert found == [(1, ())] * 2


CI: list[tuple[str, Constraints]] = [
    ("causal", {TP: 2}),
    ("image", {TP: 2, SEQUENCE: True}),
    ("biased", {TP: 2, "recompute": "full"}),
    ("causal", {TP: 2, **COMPILED}),
]
REST: list[tuple[str, Constraints]] = [
    (name, plan)
    for name in KINDS
    for plan in (
        {TP: 2},
        {TP: 2, SEQUENCE: True},
        {TP: 2, **COMPILED},
        {TP: 2, "tensor_parallel.overlap": 2},
    )
    if (name, plan) not in CI
]


@pytest.mark.by_day("*'compile': 'blocks'*")
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


@pytest.mark.by_day("*'data_parallel.size': 2*")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("causal", {TP: 2, PP: 2, PARTS: 2}),
        ("biased", {TP: 2, DP: 2, ZERO: 3}),
        ("image", {TP: 4, SEQUENCE: True}),
        ("biased", {TP: 2, PP: 2, PARTS: 2}),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, name: str, plan: Constraints
) -> None:
    compare(world4, build, name, plan)
