"""Models that return what a block returned, as it was, and leave the loss to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import WIDTH, Block, Program, Run, right, rows

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


class Trunk(nn.Module):
    """Returns the output of its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def hidden(self, x: Tensor) -> list[Tensor]:
        made = [x]
        for block in self.blocks:
            made.append(block(made[-1]))
        return made[1:]

    def forward(self, x: Tensor) -> Any:
        return self.hidden(x)[-1]


class Hidden(Trunk):
    """Returns the outputs of all blocks, beside what a head makes of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return {"logits": self.head(hidden[-1]), "hidden": tuple(hidden)}


def perceptron() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH) if index % 2 == 0 else nn.ReLU() for index in range(7))
    return nn.Sequential(*layers)


Loss = Callable[[Any, Tensor], Tensor]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "a sequence": (perceptron, F.mse_loss),
    "the last": (Trunk, F.mse_loss),
    "written to": (Trunk, lambda out, y: F.mse_loss(out.mul_(2), y)),
    "hidden, last": (Hidden, lambda out, y: F.mse_loss(out["hidden"][-1], y)),
    "hidden, first": (Hidden, lambda out, y: F.mse_loss(out["hidden"][0], y)),
    "all": (
        Hidden,
        lambda out, y: sum(
            (F.mse_loss(x, y) for x in out["hidden"]), F.mse_loss(out["logits"], y)
        ),
    ),
}


def _train(name: str, passes: int, run: Run) -> None:
    make, loss_of = PROGRAMS[name]
    model, optimizer = run.start(make())
    for batch in rows(4):
        part: Mapping[str, Tensor] = run.part(batch)
        for _ in range(passes):
            with torch.no_grad():
                model(part["x"])
            model(part["x"])  # of which nothing is differentiated
            loss_of(model(part["x"]), part["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def program(name: str, passes: int = 1) -> Program:
    return partial(_train, name, passes)


@pytest.mark.by_day("a sequence-dp", "the last-zero1", "written to-zero2")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [*product(PROGRAMS, PLANS)])
def test_a_loss_of_what_blocks_returned(world2: World, name: str, plan: str) -> None:
    right(world2, program(name), PLANS[plan])


@pytest.mark.by_day("a sequence-zero2", "all-zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ["a sequence", "all"])
def test_gradients_add_up(world2: World, name: str, plan: str) -> None:
    right(world2, program(name, passes=2), PLANS[plan])


@pytest.mark.by_day("full")
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_on_four_ranks(world4: World, recompute: str) -> None:
    right(world4, program("the last"), {TP: 2, DP: 2, ZERO: 3, "recompute": recompute})


class Dropping(nn.Module):
    """Returns what it is given where it is dropped: stochastic depth of whole batches."""

    def __init__(self, dropped: int) -> None:
        super().__init__()
        self.inner, self.dropped = Block(), dropped

    def forward(self, x: Tensor, *, step: int) -> Tensor:
        return x if step % 4 == self.dropped else self.inner(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping(index) for index in range(4))

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x, step=step)
        return F.mse_loss(x, y)


def dropped(run: Run) -> None:
    model, optimizer = run.start(Deep())
    for step, batch in enumerate(rows(5)):
        loss = model(**run.part(batch), step=step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("zero2-none", "zero2-full", "zero3-none")
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_blocks_may_return_what_they_were_given(world2: World, plan: str, recompute: str) -> None:
    right(world2, dropped, {**PLANS[plan], "recompute": recompute})
