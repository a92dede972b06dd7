"""A pipeline cuts a batch along the dim in which rows were seen to lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, PipelineParallel, parallelize
from vescale_testing import World

# float64: micro-batches are summed one after the other, rows of one device all at once.
ROUNDING = 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_TBD: Tensor) -> Tensor:
        return x_TBD + self.down(self.up(x_TBD).relu())


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x_TBD: Tensor, labels_B: Tensor) -> Tensor:
        for block in self.blocks:
            x_TBD = block(x_TBD)
        return F.cross_entropy(self.head(x_TBD.cumsum(0)[-1]), labels_B)


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return TimeFirst().double(), torch.randn(4, 6, 8, dtype=torch.float64), torch.arange(6) % 5


def on_rank_step() -> tuple[float, dict[str, Tensor]]:
    plan = ParallelPlan(pipeline_parallel=PipelineParallel(size=2, microbatches=2))
    model, x_TBD, labels_B = made()
    parallelize(plan, model)
    loss = model(x_TBD, labels_B)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), {n: g.full_tensor() for n, g in grads.items() if isinstance(g, DTensor)}


def test_micro_batches_of_a_time_first_batch_are_rows_and_not_steps(world2: World) -> None:
    model, x_TBD, labels_B = made()
    loss = model(x_TBD, labels_B)
    loss.backward()
    for found, grads in world2.run(on_rank_step):
        assert abs(found - loss.item()) < ROUNDING
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=ROUNDING)
