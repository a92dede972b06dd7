"""What forward keeps in attributes is one device's to a program that reads it between calls."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import vescale
from vescale_testing import World

from .plans import SEQUENCE, TP, Constraints
from .test_stays_pytorch import whole

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 24, 4, 12


class Attention(nn.Module):
    """Keeps its map, as programs do that draw it, or train it."""

    weights: Tensor | None = None
    projected: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        projected = self.projected = self.qkv(x_BSF)
        parts = projected.chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        self.weights = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Keeps what its layers compute, and a running mean that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.active: Tensor | None = None
        self.mean: Tensor | None = None

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        self.active = F.gelu(self.up(x_BSF))
        latest = self.active.detach().mean((0, 1))
        self.mean = latest if self.mean is None else 0.9 * self.mean + 0.1 * latest
        return x_BSF + self.down(self.active - 0.1 * self.mean)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSF = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.head(x_BSF).flatten(0, 1), labels_BS.flatten())


def batch_of(step: int, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(0, VOCABULARY, (4, length + step), generator=generator)
    return {"tokens_BS": tokens_BS, "labels_BS": tokens_BS.roll(-1, 1)}


def parallelized(constraints: Constraints | None) -> Any:
    torch.manual_seed(0)
    model = Keeping().double()
    if constraints is None:
        return model, AdamW(model.parameters(), lr=1e-2)
    plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=batch_of(0))
    return vescale.parallelize(plan, model, lambda m: AdamW(m.parameters(), lr=1e-2))


def kept_by(model: Any) -> list[Tensor]:
    attentions = [block.attention for block in model.blocks]
    kept = [x for block in model.blocks for x in (block.active, block.mean)]
    return [*kept, *(x for each in attentions for x in (each.weights, each.projected))]


def trained(constraints: Constraints | None) -> list[Tensor]:
    """Take three steps on lengths of their own, and add what is kept to the loss."""
    model, optimizer = parallelized(constraints)
    found: list[Tensor] = []
    for step in range(3):
        loss = model(**batch_of(step))
        kept = kept_by(model)
        found += [whole(x) for x in kept]
        loss = loss + sum((x.square().mean() for x in kept), torch.zeros(()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(whole(model(**batch_of(3))))
    return [*found, *(whole(x) for x in kept_by(model)), *map(whole, model.parameters())]


@cache
def on_one_device() -> list[Tensor]:
    return trained(None)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_a_program_reads_and_trains_what_forward_kept(world2: World, sequence: bool) -> None:
    for found in world2.run(trained, {TP: 2, SEQUENCE: sequence}):
        for one, other in zip(found, on_one_device(), strict=True):
            # Float64, summed in another order, through three steps of AdamW.
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


class Listing(Keeping):
    """Keeps what its blocks compute in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[Tensor] = []

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        loss = super().forward(tokens_BS, labels_BS)
        self.listed = [block.active for block in self.blocks]
        return loss


def told_of_lists() -> list[str]:
    """Call a model twice; return what is said of what it keeps."""
    torch.manual_seed(0)
    plan = vescale.generate_plan(Listing(), {TP: 2}, world_size=2, example_batch=batch_of(0))
    model = vescale.parallelize(plan, Listing())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(**batch_of(step))
    return [str(each.message) for each in caught if "keeps" in str(each.message)]


@pytest.mark.slow
def test_what_is_kept_in_a_list_is_said_to_be_a_part(world2: World) -> None:
    for told in world2.run(told_of_lists):
        assert len(told) == 1
        assert "keeps 'listed', of which a tensor-parallel rank may have a part" in told[0]
