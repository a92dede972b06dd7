"""Gradients of half-precision micro-batches are added up in the dtype that the plan says."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .training import whole

pytestmark = pytest.mark.slow
ACCUMULATE = "batch.gradient_accumulation"
ZERO = "data_parallel.zero_stage"
DP2 = {"data_parallel.size": 2}
PP2 = {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 8}
HALF = {"precision.param": "bfloat16", "precision.reduce": "float32"}
WIDTH, ROWS = 8, 16


class Net(nn.Module):
    """Blocks between two uses of a weight, and a mean over a power of two of rows."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().pow(2).mean()


def _made(*, is_tied: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(is_tied=is_tied), torch.randn(ROWS, WIDTH)


def _alone(ranks: int, parts: int, *, by_part: bool, is_tied: bool) -> dict[str, Tensor]:
    """Return the gradients of one device that adds them up in float32, in the order of ranks."""
    made, x = _made(is_tied=is_tied)
    model = copy.deepcopy(made).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32  # what torch adds uses of a weight in
    found: dict[str, list[list[Tensor]]] = {}
    for rows in x.to(torch.bfloat16).chunk(ranks):
        for name, _ in model.named_parameters():
            found.setdefault(name, []).append([])
        for part in rows.chunk(parts):
            (model(part) / parts).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found[name][-1].append(parameter.grad)
            model.zero_grad()
    sums: dict[str, Tensor] = {}
    for name, of_rank in found.items():
        groups = zip(*of_rank, strict=True) if by_part and name.startswith("blocks.") else of_rank
        each = [functools.reduce(torch.add, group) for group in groups]
        sums[name] = functools.reduce(torch.add, each) / ranks
    return sums


def _compare(constraints: dict[str, Any], by_part: bool) -> None:
    plan = with_constraints(vescale.ParallelPlan(), {**HALF, **constraints})
    # Over stages a tied weight is added in another order.
    is_tied = plan.pipeline_parallel.size == 1
    made, x = _made(is_tied=is_tied)
    model = vescale.parallelize(plan, made)
    ranks = plan.data_parallel.size
    expected = _alone(ranks, plan.num_microbatches, by_part=by_part, is_tied=is_tied)
    for _ in range(2):  # also with the buffers of a step before
        model.zero_grad()
        model(x.chunk(ranks)[vescale.data_parallel_rank(model)]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(whole(parameter.grad), expected[name]), name


PLANS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one rank": (1, {ACCUMULATE: 8}, False),
    "dp2": (2, {**DP2, ACCUMULATE: 8}, False),
    "zero1": (2, {**DP2, ZERO: 1, ACCUMULATE: 8}, False),
    "zero2": (2, {**DP2, ZERO: 2, ACCUMULATE: 8}, True),
    "zero3": (2, {**DP2, ZERO: 3, ACCUMULATE: 8}, True),
    "pp2": (2, PP2, False),
    "pp2, zero bubble": (
        2,
        {**PP2, "pipeline_parallel.schedule": "zbv", "pipeline_parallel.virtual_stages": 2},
        False,
    ),
    "dp2, recomputed": (2, {**DP2, ACCUMULATE: 8, "recompute": "full"}, False),
    "zero2, on the host": (
        2,
        {**DP2, ZERO: 2, ACCUMULATE: 8, "data_parallel.offload": "optimizer"},
        True,
    ),
    "dp2 x pp2": (4, {**DP2, **PP2, ZERO: 1}, False),
}


@pytest.mark.by_day(
    "one rank", "dp2", "zero1", "pp2, zero bubble", "dp2, recomputed", "zero2, on the host"
)
@pytest.mark.parametrize("plan", PLANS)
def test_micro_batches_are_added_up_in_the_dtype_of_reductions(
    request: pytest.FixtureRequest, plan: str
) -> None:
    size, constraints, by_part = PLANS[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_compare, constraints, by_part)
