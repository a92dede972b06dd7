"""Stages of blocks of other widths that leave out branches of rows, as Swin and ConvNeXt do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from vescale_testing import World

from .plans import PARTS, PP, Constraints
from .programs import WIDTH, Run, right, rows

pytestmark = pytest.mark.slow
MICROBATCHES = 2


class Block(nn.Module):
    """Leaves out its branch for some rows."""

    def __init__(self, width: int, chance: float) -> None:
        super().__init__()
        self.norm, self.chance = nn.LayerNorm(width), chance
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.down(self.mlp(self.norm(x)))
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(1 - self.chance)
        return x + branch * keep / (1 - self.chance)


class Stage(nn.Module):
    def __init__(self, before: int, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Linear(before, width)
        self.blocks = nn.ModuleList(Block(width, 0.1 + 0.1 * i) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = block(x)
        return x


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(2, 4, 1), Stage(4, 8, 2), Stage(8, 12, 2))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(12, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.stages(batch["x"].unflatten(1, (4, 2)))
        return F.mse_loss(self.head(self.drop(x.mean(1))), batch["y"])


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, eps=1e-3)


def program(run: Run) -> None:
    """Run micro-batches one after the other on one device, as a pipeline is said to draw."""
    model, optimizer = run.start(Staged(), adamw)
    parts = MICROBATCHES if run.constraints is None else 1
    for batch in rows():
        losses: list[Tensor] = []
        for i in range(parts):
            loss = model({name: x.chunk(parts)[i] for name, x in batch.items()}) / parts
            loss.backward()
            losses.append(loss.detach())
        run.keep(torch.stack(losses).sum())
        for parameter in model.parameters():
            if parameter.grad is not None:
                run.keep(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)
    run.keep(torch.get_rng_state())


@pytest.mark.by_day("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_nested_stages_draw_what_one_device_draws_for_the_micro_batches(
    world2: World, schedule: str
) -> None:
    plan: Constraints = {PP: 2, PARTS: MICROBATCHES, "pipeline_parallel.schedule": schedule}
    right(world2, program, plan)
