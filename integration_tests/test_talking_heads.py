"""Attention whose heads are mixed before and behind the softmax: two pairs of layers in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_testing import World

from .plans import SEQUENCE, TP
from .sharded_layers import LanguageModel, compare

WIDTH, HEADS = 32, 4


class TalkingHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.before, self.behind = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        weights = self.behind(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attn = TalkingHeads()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return LanguageModel(Block).double()


@pytest.mark.slow
def test_two_ranks_with_a_sharded_sequence_have_the_losses_and_gradients_of_one(
    world2: World,
) -> None:
    compare(world2, build, "", {TP: 2, SEQUENCE: True})


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World) -> None:
    compare(world2, build, "", {TP: 2})
