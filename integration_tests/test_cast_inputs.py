"""Floating-point inputs are cast to the dtype of compute, as by FSDP2's mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .training import whole

LOW = {"precision.param": "bfloat16", "precision.reduce": "float32"}
HIGH = {"precision.param": "float64"}  # where sums of parts are in the dtype of compute
DP, ZERO, TP, PP = (
    "data_parallel.size", "data_parallel.zero_stage", "tensor_parallel.size",
    "pipeline_parallel.size",
)  # fmt: skip
PLANS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank": (1, LOW, 1),
    "dp2": (2, {**LOW, DP: 2}, 2),
    "zero3": (2, {**LOW, DP: 2, ZERO: 3}, 2),
    "accumulation": (2, {**HIGH, DP: 2, "batch.gradient_accumulation": 2}, 1),
    "pp2": (2, {**HIGH, PP: 2, "pipeline_parallel.microbatches": 2}, 1),
    "tp2": (2, {**HIGH, TP: 2}, 1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    """A loss of floats, whose targets keep their dtype if nobody casts them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        x = batch["x"] * scale
        for block in self.blocks:
            x = block(x)
        assert batch["mask"].dtype == torch.bool
        return (x - batch["y"]).square().mean().float()


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, 8, generator=generator)
    return {"x": x, "y": y, "mask": torch.ones(8, dtype=torch.bool)}, torch.full((8, 1), 1.1)


def _alone(model: nn.Module, dtype: torch.dtype, parts: int) -> tuple[float, list[Tensor]]:
    """Return the loss and the float32 gradients of rows in parts, cast by hand."""
    batch, scale = _batch()
    low = copy.deepcopy(model).to(dtype)
    losses: list[Tensor] = []
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for part in range(parts):
        rows = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in rows.items()}
        loss = low(cast, scale.chunk(parts)[part].to(dtype))
        loss.backward()
        losses.append(loss.detach())
        for total, parameter in zip(sums, low.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.to(total.dtype)
            parameter.grad = None
    return float(torch.stack(losses).double().mean()), [total / parts for total in sums]


def _run(constraints: dict[str, Any]) -> tuple[float, list[Tensor]]:
    torch.manual_seed(0)
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model = vescale.parallelize(plan, Net())
    rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size
    batch, scale = _batch()
    mine = {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}
    loss = model(mine, scale.chunk(size)[rank])
    loss.backward()
    assert mine["x"].dtype == torch.float32
    found: list[Tensor] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(whole(parameter.grad))
    return loss.item(), found


def _compare(constraints: dict[str, Any], parts: int) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, constraints["precision.param"])
    expected, gradients = _alone(Net(), dtype, parts)
    loss, found = _run(constraints)
    # Both losses end in float32.
    assert loss == pytest.approx(expected, rel=2**-23, abs=0)
    for own, other in zip(found, gradients, strict=True):
        if dtype == torch.float64:  # rounded to the float32 of the parameters
            torch.testing.assert_close(own, other, rtol=2**-22, atol=1e-12)
        else:
            assert torch.equal(own, other)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_float32_batch_is_that_of_one_device_with_the_same_casts(
    request: pytest.FixtureRequest, plan: str
) -> None:
    size, constraints, parts = PLANS[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_compare, constraints, parts)


def _kept() -> list[torch.dtype]:
    seen: list[torch.dtype] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: narrower
            seen.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    for constraints in ({}, LOW, {**LOW, "precision.cast_inputs": False}):
        plan = with_constraints(vescale.ParallelPlan(), constraints)
        vescale.parallelize(plan, Looks(4, 4))(torch.randn(2, 4))
    return seen


def test_inputs_keep_their_dtype_where_the_plan_says_so(world1: World) -> None:
    (seen,) = world1.run(_kept)
    assert seen == [torch.float32, torch.bfloat16, torch.float32]


class Positions(nn.Module):
    """Adds a table of its own to activations, which no plan casts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.get_buffer("table")).float().sum()


def _names_what_is_not_cast() -> None:
    model = vescale.parallelize(with_constraints(vescale.ParallelPlan(), LOW), Positions())
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(2, 8))
    notes = " ".join(caught.value.__notes__)
    assert "precision.param bfloat16 casts parameters and inputs" in notes
    assert "'table' of float32" in notes


def test_an_error_about_dtypes_names_what_is_not_cast(world1: World) -> None:
    world1.run(_names_what_is_not_cast)
