"""Projections in a list of the module that calls them, as The Annotated Transformer has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_testing import World

from .families import VOCABULARY, tokens
from .plans import PARTS, PP, SEQUENCE, TP, Constraints
from .sharded_layers import compare

WIDTH = 32


class Attention(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.h, self.d_k = h, WIDTH // h
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        rows = query.size(0)
        q, k, v = (
            linear(x).view(rows, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = (q @ k.transpose(-2, -1)) / q.size(-1) ** 0.5
        weights = self.dropout(scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1))
        x = (weights @ v).transpose(1, 2).contiguous().view(rows, -1, self.h * self.d_k)
        return self.linears[-1](x)


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention(4)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.sublayer = nn.ModuleList(Sublayer() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(1, length, length, dtype=torch.bool, device=input_ids.device).tril()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Annotated().double()


def test_they_are_sharded_by_heads() -> None:
    plan = propose_sharding(build(""), "auto", 2, example_batch=tokens()).plan
    linears = "layers.*.self_attn.linears"
    assert all(plan[f"{linears}.{index}.weight"] == "Shard(0)" for index in range(3))
    assert plan[f"{linears}.3.weight"] == "Shard(1)"
    assert plan["layers.*.self_attn.<attr:h>"] == "Shard(0)"


@pytest.mark.by_day("*'tensor_parallel.sequence': True*")
@pytest.mark.parametrize("plan", [{TP: 2}, {TP: 2, SEQUENCE: True}], ids=str)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, plan: Constraints) -> None:
    compare(world2, build, "", plan)


@pytest.mark.nightly
def test_stages_of_them_do(world4: World) -> None:
    compare(world4, build, "", {TP: 2, PP: 2, PARTS: 2})
