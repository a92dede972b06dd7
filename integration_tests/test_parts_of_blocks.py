"""Parts of blocks that a model calls outside of their block, as diffusion transformers do."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, TP, ZERO, Constraints
from .programs import DATA, WIDTH, Run, attempt, right, rows, sgd

PLANS: dict[str, Constraints] = {
    **DATA,
    "kept": {DP: 2, ZERO: 3, "data_parallel.reshard_after_forward": False},
    "recompute": {DP: 2, ZERO: 3, "recompute": "full"},
    "accumulation": {DP: 2, ZERO: 3, "batch.gradient_accumulation": 2},
    "early": {DP: 2, ZERO: 2, "batch.gradient_accumulation": 2},
    "tp": {TP: 2},
}
# Nothing is freed, or backward finds what it needs: refused otherwise.
WITHIN = ["dp", "zero2", "early"]


class Condition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = Condition()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * (1 + self.scale(self.condition(y)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, other: nn.Module | None = None) -> Tensor:
        x = x + self.linear(self.norm(x, y)).tanh()
        return x if other is None else self.linear(x + other(x))


class Conditioned(nn.Module):
    """Calls parts of blocks where ``where`` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def condition(self, index: int) -> Condition:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block.norm.condition

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, y = self.first(batch["x"]), batch["y"]
        if self.where == "before":
            x = x + self.condition(-1)(y)
        for index, block in enumerate(self.blocks):
            other = self.condition(0) if self.where == "within" and index == 2 else None
            x = block(x, y, other) if other is not None else block(x, y)
            if self.where == "between" and index == 1:
                x = x * (1 + self.condition(index)(y) + self.condition(3)(x))
        if self.where == "behind":
            x = x * (1 + self.condition(0)(y))
        if self.where == "twice":
            x = self.condition(2)(self.condition(2)(x)) + self.condition(2)(y)
        if self.where == "of a part":
            x = x + self.condition(1)(x) + self.condition(1).up(y)[..., :WIDTH]
        return F.mse_loss(self.head(x), y)


class Shared(Conditioned):
    """All blocks have the same condition, which is no part of any."""

    def __init__(self) -> None:
        super().__init__("behind")
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm.condition = self.condition(0)


PLACES = ["behind", "before", "between", "twice", "of a part", "within"]


def trained(where: str, run: Run) -> None:
    run.train(Conditioned(where))


def evaluated_first(run: Run) -> None:
    """Evaluates before it trains, and in between."""
    model, optimizer = run.start(Conditioned("behind"), sgd)
    for batch in rows():
        with torch.no_grad():
            run.keep(model(run.part(batch)))
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("behind-zero3", "behind-zero2", "within-zero2", "between-recompute")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "plan"),
    [
        pytest.param(where, plan, marks=pytest.mark.nightly)
        for where in PLACES
        for plan in (PLANS if where != "within" else WITHIN)
        # What it cuts off of a result of which tensor-parallel ranks have parts is refused.
        if (where, plan) != ("of a part", "tp")
    ],
)
def test_parts_are_gathered_where_they_are_called(world2: World, where: str, plan: str) -> None:
    right(world2, functools.partial(trained, where), PLANS[plan])


@pytest.mark.slow
def test_parts_may_be_called_in_evaluation_first(world2: World) -> None:
    right(world2, evaluated_first, DATA["zero3"])


def shared(run: Run) -> None:
    run.train(Shared())


@pytest.mark.slow
def test_what_blocks_share_is_no_part_of_one(world2: World) -> None:
    right(world2, shared, DATA["zero3"])


@pytest.mark.slow
def test_parts_called_within_other_blocks_are_refused(world2: World) -> None:
    for answer in world2.run(attempt, functools.partial(trained, "within"), DATA["zero3"]):
        assert answer is ValueError
