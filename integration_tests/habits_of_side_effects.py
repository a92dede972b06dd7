"""Programs whose layers hand tensors over by lists, globals and counters of their files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale

from .programs import WIDTH, Block, Run, rows, sgd

BALANCING = list[Tensor]()


class Calls:
    """Counts calls of a model, as a schedule of its noise does."""

    number = 0


class Balanced(nn.Module):
    """Saves a loss for the loop to add, as megablocks' and tutel's experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        save_balancing_loss(y.square().mean())
        return y


def save_balancing_loss(loss: Tensor) -> None:
    BALANCING.append(loss)


class Experts(nn.Module):
    def __init__(self, *, is_normed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if is_normed else nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.norm(batch["x"])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch["y"])


class ExpertsThatAdd(Experts):
    """Adds the losses itself."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        BALANCING.clear()
        return super().forward(batch) + 0.1 * sum(BALANCING)


class Counted(Experts):
    """Weighs its loss by the number of its call."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        Calls.number += 1
        loss = super().forward(batch)
        BALANCING.clear()
        return loss * (1 + 0.1 * Calls.number)


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = self.inner(x)
        losses.append(y.square().mean())
        return y


class Filled(nn.Module):
    """Gives its blocks a list to append to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Filling() for _ in range(4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, losses = batch["x"], list[Tensor]()
        for block in self.blocks:
            x = block(x, losses)
        return F.mse_loss(x, batch["y"]) + 0.1 * sum(losses)


def _added_by_the_loop(run: Run, model: Any) -> None:
    BALANCING.clear()
    batches, model = rows(), model.double()
    optimizer: Any = sgd(model)
    if run.constraints is not None:
        plan = vescale.generate_plan(model, run.constraints, example_batch=batches[0])
        model, optimizer = vescale.parallelize(plan, model, sgd)
    for batch in batches:
        loss = model(run.part(batch))
        run.keep(torch.tensor(float(len(BALANCING))))
        (loss + 0.1 * torch.stack(BALANCING).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        BALANCING.clear()
    run.finish(model)


def added_by_the_loop(run: Run) -> None:
    _added_by_the_loop(run, Experts())


def added_beside_a_norm(run: Run) -> None:
    _added_by_the_loop(run, Experts(is_normed=True))


def added_in_forward(run: Run) -> None:
    run.train(ExpertsThatAdd())


def counted(run: Run) -> None:
    Calls.number = 0
    run.train(Counted())


def filled(run: Run) -> None:
    run.train(Filled())
