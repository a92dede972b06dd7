"""Experts in lists whose owner computes over all rows: capacities, balancing losses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .experts import VOCABULARY, adamw, rows_of, tokens
from .listed_experts import HIDDEN, mlp
from .plans import DP, EP, ZERO, Constraints, make_plan
from .training import whole

EXPERTS = 4


class Mixture(nn.Module):
    """Experts that each get rows as one of several publications has it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(mlp() for _ in range(EXPERTS))
        self.loss: Tensor | None = None

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        flat = x_BSH.view(-1, HIDDEN)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2)
        load = F.one_hot(chosen, EXPERTS).to(flat.dtype).mean((0, 1))
        balance = EXPERTS * (load * scores.mean(0)).sum()
        capacity = len(flat) // EXPERTS  # less than some are chosen by
        match self.kind:
            case "expert_choice":
                made = self.of_experts_choice(flat, scores, capacity)
            case "switch":
                made = self.of_first_rows(flat, weights, chosen, capacity)
            case "gshard":
                made = self.of_slots(flat, weights[:, 0], chosen[:, 0], capacity)
            case _:
                made = self.of_all_rows(flat, weights, chosen)
        if self.kind == "kept":
            self.loss = balance
        return made.view_as(x_BSH), balance

    def of_all_rows(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            out[row] += expert(flat[row]) * weights[row, slot, None]
        return out

    def of_first_rows(
        self, flat: Tensor, weights: Tensor, chosen: Tensor, capacity: int
    ) -> Tensor:
        out, mask = torch.zeros_like(flat), F.one_hot(chosen[:, 0], EXPERTS)
        kept = (mask * (mask.cumsum(0) <= capacity)).bool()
        for index, expert in enumerate(self.experts):
            (row,) = torch.where(kept[:, index])
            out[row] += expert(flat[row]) * weights[row, 0, None]
        return out

    def of_slots(self, flat: Tensor, weight: Tensor, chosen: Tensor, capacity: int) -> Tensor:
        mask = F.one_hot(chosen, EXPERTS)
        slot = ((mask.cumsum(0) - 1) * mask).sum(-1)
        of_slot = F.one_hot(slot.clamp(max=capacity - 1), capacity)
        sent = mask[:, :, None] * of_slot[:, None] * (slot < capacity)[:, None, None]
        sent = sent.to(flat.dtype)
        rows_ECH = torch.einsum("tec,th->ech", sent, flat)
        made = torch.stack([expert(rows_ECH[i]) for i, expert in enumerate(self.experts)])
        return torch.einsum("tec,ech->th", sent * weight[:, None, None], made)

    def of_experts_choice(self, flat: Tensor, scores: Tensor, capacity: int) -> Tensor:
        out = torch.zeros_like(flat)
        weights, rows = scores.t().topk(capacity, dim=-1)
        for index, expert in enumerate(self.experts):
            made = expert(flat[rows[index]]) * weights[index][:, None]
            out.index_add_(0, rows[index], made)
        return out


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Mixture(kind) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, balance = self.embed(input_ids), list[Tensor]()
        for block in self.blocks:
            made, loss = block(self.norm(x))
            x = x + made
            kept: Any = block.loss
            balance.append(loss if kept is None else kept)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * torch.stack(balance).sum()


def trained(kind: str, constraints: Constraints | None) -> list[Tensor]:
    """Return the losses and all gradients of some steps; none are zeros."""
    model: Any = Model(kind).double()
    if constraints is None:
        optimizer: Any = adamw(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    found = list[Tensor]()
    for step in range(2):
        batch = tokens(step) if constraints is None else rows_of(model, tokens(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)  # rows of all ranks are looked through
            loss = model(**batch)
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        found += [
            loss.detach(),
            *(torch.ones(()) if g is None else whole(g).clone() for g in grads),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found


def check(world: World, kind: str, plan: Constraints) -> None:
    expected = trained(kind, None)
    for found in world.run(trained, kind, plan):
        for x, one in zip(found, expected, strict=True):
            # Sums of float64 over the rows of all ranks, in another order.
            torch.testing.assert_close(x, one, rtol=1e-11, atol=1e-13)


KINDS = ["kept", "returned", "switch", "gshard", "expert_choice"]
MORE: list[Constraints] = [
    {EP: 4},
    {EP: 2, ZERO: 1},
    {EP: 2, ZERO: 3},
    {EP: 2, "recompute": "full"},
]


@pytest.mark.by_day("returned")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_owners_of_lists_compute_over_all_rows(world2: World, kind: str) -> None:
    check(world2, kind, {DP: 2, EP: 2})


@pytest.mark.slow
def test_rows_are_in_order_where_parameters_are_sharded_over_the_outer_axis(
    world4: World,
) -> None:
    check(world4, "switch", {DP: 4, EP: 2, ZERO: 2})


@pytest.mark.nightly
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_compute_over_all_rows(world4: World, kind: str, more: Constraints) -> None:
    check(world4, kind, {DP: 4, **more})
