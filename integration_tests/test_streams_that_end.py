"""Blocks of two streams of tokens, whose last one ends a stream, and that share a parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_testing import World

from .families import VOCABULARY, tokens
from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .sharded_layers import compare

WIDTH, HEADS = 32, 4
HEAD = WIDTH // HEADS


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Joint(nn.Module):
    """Attention of both streams together, as MochiAttention: heads have their own frequencies."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.added_q, self.added_k, self.added_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.added_out = None if is_last else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, text: Tensor, angles: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = (each(x).unflatten(2, (self.heads, -1)) for each in (self.q, self.k, self.v))
        q, k = rotated(self.norm_q(q), angles), rotated(self.norm_k(k), angles)
        added = (self.added_q, self.added_k, self.added_v)
        of_text = [each(text).unflatten(2, (self.heads, -1)) for each in added]
        both = [torch.cat(pair, 1) for pair in zip((q, k, v), of_text, strict=True)]
        q, k, v = (each.transpose(1, 2) for each in both)
        y = F.scaled_dot_product_attention(q, k, v)
        y, y_text = y.transpose(1, 2).flatten(2).split([x.shape[1], text.shape[1]], dim=1)
        return self.out(y), None if self.added_out is None else self.added_out(y_text)


class Block(nn.Module):
    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.norm, self.norm_text = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Joint(is_last=is_last)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
        )

    def forward(self, x: Tensor, text: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        y, y_text = self.attn(self.norm(x), self.norm_text(text), angles)
        x = x + y
        return x + self.mlp(x), text if y_text is None else text + y_text


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.frequencies = nn.Parameter(torch.randn(HEADS, HEAD // 2))
        self.blocks = nn.ModuleList(Block(is_last=index == 1) for index in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = torch.einsum("s,hd->shd", places.to(self.frequencies.dtype), self.frequencies)
        x, text = self.embed(input_ids), self.text(input_ids[:, :5])
        for block in self.blocks:
            x, text = block(x, text, angles)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(_: str) -> nn.Module:
    torch.manual_seed(3)
    return Streams().double()


def test_attention_of_the_block_that_ends_a_stream_is_sharded_as_that_of_others() -> None:
    plan = propose_sharding(build(""), "auto", 2, example_batch=tokens()).plan
    assert plan["frequencies"] == "Shard(0)"
    assert plan["blocks.*.attn.<attr:heads>"] == "Shard(0)"
    assert plan["blocks.*.attn.added_out.weight"] == "Shard(1)"


@pytest.mark.by_day("{'tensor_parallel.size': 2}*")
@pytest.mark.parametrize(
    "plan",
    [{TP: 2}, {TP: 2, "recompute": "full"}],
    ids=str,
)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, plan: Constraints) -> None:
    compare(world2, build, "", plan)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan", [{TP: 4}, {TP: 2, PP: 2, PARTS: 2}, {TP: 2, DP: 2, ZERO: 3}], ids=str
)
def test_four_ranks_have_the_losses_and_gradients_of_one(world4: World, plan: Constraints) -> None:
    compare(world4, build, "", plan)
