"""Stacked experts whose owner computes over all rows: capacities, dispatch buffers, losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .experts import VOCABULARY, adamw, rows_of, tokens
from .listed_experts import HIDDEN, INNER, Stacks
from .plans import DP, EP, TP, ZERO, Constraints, make_plan
from .test_expert_parallel_habits import Stack
from .training import whole

EXPERTS, CHOSEN = 4, 2


class Bmm(nn.Module):
    """The experts of nanoMoE: rows (experts, capacity, features), biases beside."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 3)
        self.c_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 3)
        self.fc_bias = nn.Parameter(torch.randn(EXPERTS, 1, INNER))
        self.proj_bias = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN))

    def forward(self, x_ECH: Tensor) -> Tensor:
        x_ECF = F.gelu(torch.bmm(x_ECH, self.c_fc) + self.fc_bias)
        return torch.bmm(x_ECF, self.c_proj) + self.proj_bias


class Router(nn.Module):
    """Ranks tokens of the whole batch for each expert, first choices first, as nanoMoE does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.w_g, self.factor = nn.Linear(HIDDEN, EXPERTS, bias=False), factor

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens = len(x_TH)
        capacity = int(self.factor * CHOSEN * num_tokens / EXPERTS)
        logits = self.w_g(x_TH)
        best, chosen = logits.topk(CHOSEN, dim=-1)
        probs = torch.full_like(logits, float("-inf")).scatter(-1, chosen, best).softmax(-1)
        mask = F.one_hot(chosen, EXPERTS).permute(1, 0, 2)  # (k, tokens, experts)
        rank = mask.reshape(CHOSEN * num_tokens, EXPERTS).cumsum(0) - 1
        rank = rank.reshape(CHOSEN, num_tokens, EXPERTS)
        mask = mask * torch.lt(rank, capacity)
        of_token = F.one_hot((mask * rank).sum(-1), capacity)
        weights = (mask * probs[None])[..., None] * of_token[:, :, None]
        load = F.one_hot(chosen, EXPERTS).sum(1).to(x_TH.dtype).mean(0)
        return weights.sum(0), EXPERTS * (load * probs.mean(0)).sum()


class NanoMoE(nn.Module):
    def __init__(self, factor: float = 1.25) -> None:
        super().__init__()
        self.router, self.experts = Router(factor), Bmm()

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        flat = x_BSH.view(-1, HIDDEN)
        weights, balance = self.router(flat)
        sent_ECH = weights.bool().permute(1, 2, 0).type_as(flat) @ flat
        made = self.experts(sent_ECH).view(-1, HIDDEN)
        return (weights.view(len(flat), -1) @ made).view_as(x_BSH), balance


class FewSlots(NanoMoE):
    """A capacity that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__(0.22)


class Buffer(nn.Module):
    """A router that fills a buffer of (experts, capacity, features), and reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Bmm()

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        flat = x_BSH.reshape(-1, HIDDEN)
        scores = self.router(flat).softmax(-1)
        weight, chosen = scores.max(-1)
        mask, capacity = F.one_hot(chosen, EXPERTS), len(flat) // EXPERTS + 3
        slot = ((mask.cumsum(0) - 1) * mask).sum(-1)
        (kept,) = torch.where(slot < capacity)
        buffer = flat.new_zeros(EXPERTS, capacity, HIDDEN)
        buffer[chosen[kept], slot[kept]] = flat[kept]
        made = self.experts(buffer)
        out = torch.zeros_like(flat)
        out[kept] = made[chosen[kept], slot[kept]] * weight[kept, None]
        return out.view_as(x_BSH), scores.mean(0).square().sum()


class AllTokens(nn.Module):
    """As Llama 4, with a balancing loss: flat rows, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Stacks(EXPERTS, is_flat=True)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        flat = x_BSH.view(-1, HIDDEN)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(1, dim=-1)
        of_each = torch.zeros_like(scores).scatter(1, chosen, weights)
        routed = flat.repeat(EXPERTS, 1) * of_each.t().reshape(-1, 1)
        made = self.experts(routed).view(EXPERTS, *x_BSH.shape).sum(0)
        return made, EXPERTS * (F.one_hot(chosen[:, 0], EXPERTS).to(flat) * scores).mean(
            0
        ).square().sum()


class Sequences(nn.Module):
    """A capacity of each sequence, in four dims, and a balancing loss of all."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Stacks(EXPERTS, is_flat=False)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x_BSH).softmax(-1)
        weight, chosen = scores.max(-1)
        mask = F.one_hot(chosen, EXPERTS)
        place = (mask.cumsum(1) * mask).sum(-1)
        slots = F.one_hot(place.clamp(max=3), 4)[..., 1:]
        sent = (mask[..., None] * slots[:, :, None]).to(x_BSH)
        made = self.experts(torch.einsum("bnd,bnec->ebcd", x_BSH, sent))
        out = torch.einsum("ebcd,bnec,bn->bnd", made, sent, weight)
        return out, scores.mean((0, 1)).square().sum()


class Dropped(nn.Module):
    """Rows, experts and weights of the tokens that are within a capacity: ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Stack(EXPERTS)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        flat = x_BSH.reshape(-1, HIDDEN)
        scores = self.router(flat).softmax(-1)
        weight, chosen = scores.topk(1)
        mask = F.one_hot(chosen[:, 0], EXPERTS)
        (kept,) = torch.where((mask * mask.cumsum(0)).sum(-1) <= 9)
        out = torch.zeros_like(flat)
        out[kept] = self.experts(flat[kept], chosen[kept], weight[kept])
        return out.view_as(x_BSH), scores.mean(0).square().sum()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (NanoMoE, FewSlots, Buffer, AllTokens, Sequences, Dropped)
}


class Model(nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(LAYERS[layer]() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, balance = self.embed(input_ids), list[Tensor]()
        for block in self.blocks:
            made, loss = block(self.norm(x))
            x = x + made
            balance.append(loss)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * torch.stack(balance).sum()


def trained(layer: str, constraints: Constraints | None) -> list[Tensor]:
    """Return the losses and all gradients of some steps."""
    model: Any = Model(layer).double()
    if constraints is None:
        optimizer: Any = adamw(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    found = list[Tensor]()
    for step in range(3):
        batch = rows_of(model, tokens(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)  # rows of all ranks are looked through
            loss = model(**batch)
            loss.backward()
        found += [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def check(world: World, layer: str, plan: Constraints) -> None:
    expected = trained(layer, None)
    for found in world.run(trained, layer, plan):
        for x, one in zip(found, expected, strict=True):
            # Sums of float64 over the rows of all ranks, in another order.
            torch.testing.assert_close(x, one, rtol=1e-11, atol=1e-13)


@pytest.mark.by_day("Sequences")
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_owners_of_stacks_compute_over_all_rows(world2: World, layer: str) -> None:
    check(world2, layer, {DP: 2, EP: 2})


@pytest.mark.nightly
def test_more_slots_are_shared_than_there_are_of_some_ranks(world4: World) -> None:
    check(world4, "FewSlots", {DP: 4, EP: 4, ZERO: 1})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [{DP: 4, EP: 2, ZERO: 3}, {DP: 4, EP: 4, "recompute": "full"}, {DP: 2, EP: 2, TP: 2}],
    ids=str,
)
@pytest.mark.parametrize("layer", LAYERS)
def test_more_ranks_compute_over_all_rows(world4: World, layer: str, more: Constraints) -> None:
    check(world4, layer, more)
