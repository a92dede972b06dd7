"""Collectives that a program was given for DistributedDataParallel, and leaves in its code."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO
from .programs import DATA, WIDTH, Block, Program, Run, both, rows
from .test_bad_input import check

Batch = Mapping[str, Tensor]
REFUSAL = "c10d::{}.* was given a distributed tensor .* Leave the collective out"


class GatherLayer(torch.autograd.Function):
    """Rows of all ranks, with their gradients, as losses of contrast have it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, batch: Batch) -> Tensor:
        x = GatherLayer.apply(self.block(batch["x"]))
        y = GatherLayer.apply(self.block(batch["y"]))
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        return F.cross_entropy(x @ y.T, torch.arange(len(x)))


class Centered(nn.Module):
    """Sums a center over ranks, as the loss of DINO."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.block(batch["x"]), batch["y"] - self.center)
        total = batch["y"].sum(0)
        dist.all_reduce(total)
        self.center = 0.5 * self.center + 0.5 * total / len(batch["y"]) / dist.get_world_size()
        return loss


def gathered(run: Run) -> None:
    run.train(Contrast())


def centered(run: Run) -> None:
    run.train(Centered())


def averaged_by_the_loop(run: Run) -> None:
    model, optimizer = run.start(Block())
    for batch in rows():
        F.mse_loss(model(run.part(batch)["x"]), run.part(batch)["y"]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize(("program", "name"), [(gathered, "allgather_"), (centered, "allreduce_")])
def test_collectives_over_the_rows_of_all_ranks_are_refused(
    world2: World, program: Program, name: str, plan: str
) -> None:
    check(world2, ValueError, REFUSAL.format(name), both, program, DATA[plan])


@pytest.mark.slow
def test_collectives_over_sharded_gradients_are_refused(world2: World) -> None:
    message = REFUSAL.format("allreduce_")
    check(world2, ValueError, message, both, averaged_by_the_loop, {DP: 2, ZERO: 3})
