"""Blocks of diffusion transformers, which are told a time step and a text beside the sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_testing import World

from .families import VOCABULARY, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import compare

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.heads = nn.Linear(WIDTH, WIDTH), HEADS

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = self.q(hidden_states), self.k(text), self.v(text)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """As PixArt, Wan and LTX-Video have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn1, self.attn2 = Attention(), Attention()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.scale_shift_table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
    ) -> Tensor:
        told = self.scale_shift_table[None] + temb.unflatten(-1, (6, -1))
        shift, scale, gate, shift_ff, scale_ff, gate_ff = told.chunk(6, dim=1)
        x = hidden_states
        x = x + gate * self.attn1(self.norm1(x) * (1 + scale) + shift)
        x = x + self.attn2(x, encoder_hidden_states)
        return x + gate_ff * self.ff(self.norm2(x) * (1 + scale_ff) + shift_ff)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.time, self.table = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, text = self.embed(input_ids), self.text(input_ids[:, :5])
        temb = self.table(F.silu(self.time(x[:, 0])))
        for block in self.blocks:
            x = block(x, text, temb=temb)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(_: str) -> nn.Module:
    torch.manual_seed(3)
    return Denoiser().double()


def test_gradients_of_what_they_are_told_are_summed_where_sequences_are_sharded() -> None:
    plan = propose_sharding(build(""), "auto", 2, sequence=True, example_batch=tokens()).plan
    assert plan["blocks.*.<enter:temb>"] == "Replicate()"
    assert plan["blocks.*.scale_shift_table.<grad>"] == "Partial()"
    assert "blocks.*.<enter:encoder_hidden_states>" not in plan


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan",
    [
        {TP: 2, SEQUENCE: True},
        {TP: 2},
        pytest.param(
            {TP: 2, SEQUENCE: True, "compile": "blocks", "compile_backend": "aot_eager"},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, plan: Constraints) -> None:
    compare(world2, build, "", plan)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan",
    [
        {TP: 2, SEQUENCE: True, PP: 2, PARTS: 2},
        {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3, "recompute": "full"},
        {TP: 4, SEQUENCE: True},
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(world4: World, plan: Constraints) -> None:
    compare(world4, build, "", plan)
