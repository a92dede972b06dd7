"""Buffers that a model writes to parts of itself: the center of DINO's loss, scales of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .programs import DATA, WIDTH, Block, Program, Run, right

Batch = Mapping[str, Tensor]


class CenteredLoss(nn.Module):
    """A row's loss looks at no other row; the center of all rows is kept by a method."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, WIDTH))

    def forward(self, said: Tensor, target: Tensor) -> Tensor:
        wanted = (target - self.center).softmax(-1)
        return -(wanted * said.log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def update(self, target: Tensor) -> None:
        self.center = self.center * 0.5 + target.sum(0, keepdim=True) / len(target) * 0.5


class SelfDistillation(nn.Module):
    """A student, and a loss whose center the model has updated, or writes itself."""

    def __init__(self, updated: Literal["before", "after", "here"]) -> None:
        super().__init__()
        self.student, self.loss, self.updated = Block(), CenteredLoss(), updated

    def forward(self, batch: Batch) -> Tensor:
        said, target = self.student(batch["x"]), 3 * batch["y"]
        if self.updated == "before":
            self.loss.update(target)
        loss = self.loss(said, target)
        if self.updated == "after":
            self.loss.update(target)
        if self.updated == "here":
            self.loss.center = self.loss.center * 0.5 + target.mean(0, keepdim=True) * 0.5
        return loss


class Within(nn.Module):
    """Such a model as a part of another one, whose own code sees one row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.model = Block(), SelfDistillation("after")

    def forward(self, batch: Batch) -> Tensor:
        return self.model({"x": self.block(batch["x"]), "y": batch["y"]})


class Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class Scaling(nn.Module):
    """Scales of a layer are made of all rows, and have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scaled = Block(), Scaled()

    def forward(self, batch: Batch) -> Tensor:
        x = self.block(batch["x"])
        self.scaled.scale = 1 / (x.var(0) + 0.1)
        return F.mse_loss(self.scaled(x), batch["y"])


def updated_before(run: Run) -> None:
    run.train(SelfDistillation("before"))


def updated_after(run: Run) -> None:
    run.train(SelfDistillation("after"))


def written_by_the_model(run: Run) -> None:
    run.train(SelfDistillation("here"))


def updated_within(run: Run) -> None:
    run.train(Within())


def scaled_by_all_rows(run: Run) -> None:
    run.train(Scaling())


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize(
    "program",
    [updated_before, updated_after, written_by_the_model, updated_within, scaled_by_all_rows],
)
def test_a_part_reads_the_buffer_that_the_model_wrote_of_all_rows(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, DATA[plan])
