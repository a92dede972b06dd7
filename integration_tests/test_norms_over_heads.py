"""Norms over features that tensor-parallel ranks have parts of: these are gathered around them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import explain, propose_sharding
from vescale_testing import World

from .families import LENGTH, ROWS, VOCABULARY, hugging_face, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import SIZES, compare
from .test_bad_input import check as check_refusal


class Block(nn.Module):
    """Attention by hand with norms of all queries and keys, and a norm inside of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(16), nn.RMSNorm(16)
        self.out = nn.Linear(16, 16)
        self.up, self.inner, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.inner(self.up(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


BACKEND = "compile_backend"
# Modules around which features are gathered, of a block.
NORMS = {
    "olmo2": ["self_attn.q_norm", "self_attn.k_norm"],
    "olmo3": ["self_attn.q_norm", "self_attn.k_norm"],
    "bitnet": ["mlp.ffn_sub_norm", "self_attn.attn_sub_norm"],
    "by_hand": ["q_norm", "k_norm", "inner"],
}
OTHERS = ["olmo3", "bitnet", "by_hand"]
PLANS: list[Constraints] = [
    {TP: 4},
    {TP: 2, SEQUENCE: True, DP: 2, ZERO: 1},
    {TP: 2, PP: 2, PARTS: 2},
]


def build(family: str) -> nn.Module:
    torch.manual_seed(3)
    if family == "by_hand":
        model: nn.Module = Blocks().double()
    else:
        model = hugging_face(family, "sdpa", **SIZES).double()
    for name, parameter in model.named_parameters():
        if "norm" in name or "inner" in name:  # not all ones, as they are drawn
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


@pytest.mark.by_day("False-bitnet")
@pytest.mark.slow
@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_around_norms_are_cut(family: str, sequence: bool) -> None:
    model = build(family)
    plan = propose_sharding(model, "auto", 2, sequence=sequence, example_batch=tokens()).plan
    block = "blocks.*" if family == "by_hand" else "model.layers.*"
    for norm in NORMS[family]:
        assert plan[f"{block}.{norm}.<whole>"] == "Shard(2)"
    matrices = {
        name
        for name, each in model.named_parameters()
        if each.dim() > 1 and name.startswith(block.replace("*", "0"))
    }
    assert {name.replace(".0.", ".*.") for name in matrices} <= plan.keys()


@pytest.mark.by_day("bitnet")
@pytest.mark.slow
@pytest.mark.parametrize("family", NORMS)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, family: str) -> None:
    compare(world2, build, family, {TP: 2})


@pytest.mark.by_day("*'compile': 'blocks'*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "constraints"),
    [
        ("olmo2", {TP: 4, SEQUENCE: True}),
        ("by_hand", {TP: 2, DP: 2, SEQUENCE: True, "compile": "blocks", BACKEND: "aot_eager"}),
        ("by_hand", {TP: 2, DP: 2, ZERO: 3}),
        ("olmo2", {TP: 2, PP: 2, PARTS: 2, SEQUENCE: True}),
        *itertools.product(OTHERS, PLANS),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, family: str, constraints: Constraints
) -> None:
    compare(world4, build, family, constraints)


def explained() -> tuple[dict[str, tuple[int, int]], str]:
    """Return calls and bytes of all-gathers by module, and what explain says."""
    model: Any = build("by_hand")
    plan = vescale.generate_plan(model, {TP: 2}, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, model)
    with explain(model) as explanation:
        model(**tokens())
    gathers = [each for each in explanation.traffic if each.forward == "all_gather"]
    return {each.module: (each.calls, each.nbytes) for each in gathers}, str(explanation)


@pytest.mark.slow
def test_their_features_are_gathered_and_nothing_else(world2: World) -> None:
    for gathered, shown in world2.run(explained):
        # Half of it is sent, of two blocks.
        assert gathered == {
            f"blocks.*.{name}": (2, 2 * ROWS * LENGTH * features * 8 // 2)
            for name, features in {"q_norm": 16, "k_norm": 16, "inner": 24}.items()
        }
        assert "gathered around it" in shown


def marked(text: str) -> None:
    plan = vescale.generate_plan(
        Blocks(), {TP: 2, "tensor_parallel.sharding_policy": "manual",
                   "tensor_parallel.sharding_plan": {"blocks.*.inner.<whole>": text}},
        world_size=2,
    )  # fmt: skip
    vescale.parallelize(plan, Blocks())


@pytest.mark.slow
def test_a_mark_that_is_no_shard_is_refused(world2: World) -> None:
    check_refusal(
        world2, ValueError, r"expected 'Shard\(d\)', how what a mod", marked, "Partial()"
    )
