"""Experts in lists whose owner counts tokens and draws noise, or that have dropout in them."""

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


class Corrected(nn.Module):
    """Noise chooses experts in training; a bias that counts correct, too, and a list of loads."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.dropout = nn.Dropout(0.2)  # of the owner, behind each expert
        self.experts = nn.ModuleList(
            nn.Sequential(mlp(), nn.Dropout(dropout)) for _ in range(EXPERTS)
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("counts", torch.zeros(EXPERTS))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        scores = self.router(flat)
        if self.training:
            scores = scores + torch.randn_like(scores) / 4
        chosen = (scores + self.get_buffer("bias")).topk(2).indices
        weights = scores.gather(1, chosen).sigmoid()
        if self.training:
            with torch.no_grad():
                self.get_buffer("counts").add_(F.one_hot(chosen, EXPERTS).sum((0, 1)))
            self.calls += 1
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return self.dropout(out).view_as(x)


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Corrected(dropout) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def trained(constraints: Constraints | None, dropout: float = 0.0) -> list[Tensor]:
    """Return losses, gradients and counts of some steps, a loss in evaluation, and generators."""
    model: Any = Model(dropout).double()
    if constraints is None:
        optimizer: Any = adamw(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    torch.manual_seed(1)
    found = list[Tensor]()
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)  # counts are those of all rows
            warnings.filterwarnings("ignore", "expert_parallel: the experts of 'blocks.0' draw")
            loss = model(**rows_of(model, tokens(step)))
            loss.backward()
        found += [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for block in model.blocks:
                assert block.calls == step + 1
                found.append(block.counts.double().clone())
                block.bias += 0.01 * (block.counts.mean() - block.counts).sign()
                block.counts.zero_()
    model.eval()
    with torch.no_grad():
        found.append(model(**rows_of(model, tokens(9))))
    return [*found, torch.get_rng_state()]


@pytest.mark.slow
def test_owners_that_count_and_draw_do_so_once(world2: World) -> None:
    expected = trained(None)
    for *found, drawn in world2.run(trained, {DP: 2, EP: 2}):
        assert torch.equal(drawn, expected[-1])
        for x, one in zip(found, expected[:-1], strict=True):
            # Sums of float64 over the rows of all ranks, in another order.
            torch.testing.assert_close(x, one, rtol=1e-11, atol=1e-13)


class Dropping(nn.Module):
    """Experts that drop, of rows that each rank picks in other numbers, and no noise or counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(mlp(), nn.Dropout(0.3)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask]) * weight[mask][:, None]
        return out


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def generators_after_steps(constraints: Constraints) -> Tensor:
    model: Any = vescale.parallelize(
        make_plan(constraints), nn.Sequential(Dropping(), Squared()).double()
    )
    torch.manual_seed(1)
    rows = torch.randn(8, HIDDEN, dtype=torch.float64)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "values decide how many random numbers")
            warnings.filterwarnings("ignore", "expert_parallel: the experts of")
            model(rows.chunk(2)[vescale.data_parallel_rank(model)]).backward()
    return torch.get_rng_state()


@pytest.mark.by_day("*'expert_parallel.size': 2*")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, EP: 2}], ids=str)
def test_generators_stay_together_where_values_decide_what_is_drawn(
    world2: World, plan: Constraints
) -> None:
    one, other = world2.run(generators_after_steps, plan)
    assert torch.equal(one, other)


@pytest.mark.nightly
def test_dropout_of_experts_is_drawn_once_more_by_recomputed_blocks(world2: World) -> None:
    kept = world2.run(trained, {DP: 2, EP: 2}, 0.3)
    again = world2.run(trained, {DP: 2, EP: 2, "recompute": "full", ZERO: 3}, 0.3)
    expected = trained(None)
    assert not torch.equal(kept[0][0], expected[0])  # experts drop
    for found in (*kept, *again):
        for x, one in zip(found, kept[0], strict=True):
            assert torch.equal(x, one)  # generators among them
