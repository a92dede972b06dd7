"""Programs whose layers hand tensors over by lists, globals and counters of their files."""

from __future__ import annotations

import warnings
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


class Hooked(nn.Module):
    """Adds a penalty of what hooks on its blocks keep, in a list that it holds in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kept: Any = {} if way == "a dict" else []
        self.way = way
        if way == "an inner module's hook":
            hooked: list[nn.Module] = [block.get_submodule("down") for block in self.blocks]
        else:
            hooked = [*self.blocks]
        self.hooked = hooked
        if way != "later":
            self.keep()

    def keep(self) -> None:
        for index, module in enumerate(self.hooked):
            module.register_forward_hook(self._keeping(index))

    def _keeping(self, index: int) -> Any:
        kept, way = self.kept, self.way
        if way == "a global":
            return lambda module, args, output: BALANCING.append(output)
        if way == "a dict":
            return lambda module, args, output: kept.update({index: output})
        if way == "detached":
            return lambda module, args, output: self.kept.append(output.detach())
        return lambda module, args, output: self.kept.append(output)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.kept.clear()
        BALANCING.clear()
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x, batch["y"])
        if self.way == "detached":
            return loss
        values = [*self.kept.values()] if self.way == "a dict" else [*self.kept, *BALANCING]
        return loss + 0.1 * sum(each.square().mean() for each in values)


class NotFound(nn.Module):
    """Reads what its blocks leave in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.register_forward_hook(_leave_penalty)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, batch["y"]) + 0.1 * sum(block.penalty for block in self.blocks)


def _leave_penalty(block: Any, _: Any, output: Tensor) -> None:
    block.penalty = output.square().mean()


def hooked(run: Run, way: str) -> None:
    run.train(Hooked(way))


def hooked_later(run: Run) -> None:
    """Add the hooks behind a step."""
    model, optimizer = run.start(Hooked("later"))
    for number, batch in enumerate(rows()):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
        if not number:
            model.keep()
    run.finish(model)


def not_found(run: Run) -> str:
    """Return the notes of the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # trial runs call no hooks
            run.train(NotFound())
    except AttributeError as error:
        return " ".join(error.__notes__)
    return ""
