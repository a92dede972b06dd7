"""Forwards that draw from Python's random or from NumPy draw what they draw on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints
from .programs import Block, Plain, Run, assert_right, both, rows
from .test_bad_input import broken2 as broken2, check

pytestmark = pytest.mark.slow

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "of both": lambda: random.uniform(0, 1) * float(np.random.uniform()),
}


class Scaled(Block):
    """Scales what it returns by chance, and leaves out half of it now and then."""

    draw: Callable[[], float]

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.draw() < 0.3 else super().forward(x)
        return kept * (0.5 + self.draw())


class Drawing(Plain):
    """Draws in its blocks, before and behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for block in self.blocks:
            block.__class__ = Scaled
            vars(block)["draw"] = DRAWS[kind]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        draw = DRAWS[self.kind]
        x = super().logits({"x": batch["x"] * (1 + draw())})
        return x * (1 + draw())


def program(kind: str, num_parts: int, run: Run) -> None:
    """Train; one device runs forward and backward of one part of the batch after the other."""
    random.seed(3)
    np.random.seed(3)
    model, optimizer = run.start(Drawing(kind))
    for batch in rows(3):
        if run.constraints is None:
            losses: list[Tensor] = []
            for part in range(num_parts):
                given = {name: each.chunk(num_parts)[part] for name, each in batch.items()}
                loss = model(given) / num_parts
                loss.backward()
                losses.append(loss.detach())
            run.keep(torch.stack(losses).sum())
        else:
            loss = model(run.part(batch))
            loss.backward()
            run.keep(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)
    run.keep(torch.tensor([random.random(), np.random.rand()]))


class Program:
    """One of these programs, which ranks can be sent."""

    def __init__(self, kind: str, num_parts: int) -> None:
        self.kind, self.num_parts = kind, num_parts

    def __call__(self, run: Run) -> None:
        program(self.kind, self.num_parts, run)


PLANS: dict[str, tuple[Constraints, int]] = {
    "1f1b": ({PP: 2, PARTS: 2}, 2),
    "interleaved": ({PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2}, 4),
    "recomputed": ({PP: 2, PARTS: 2, "recompute": "full"}, 2),
    "accumulated": ({DP: 2, "batch.gradient_accumulation": 2}, 1),
    "zero3-recomputed": ({DP: 2, ZERO: 3, "recompute": "full"}, 1),
}


@pytest.mark.by_day(
    "python-recomputed", "numpy-accumulated", "of both-1f1b", "of both-zero3-recomputed"
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", DRAWS)
def test_forward_draws_the_numbers_of_one_device(world2: World, kind: str, plan: str) -> None:
    constraints, num_parts = PLANS[plan]
    for answers in world2.run(both, Program(kind, num_parts), constraints):
        assert_right(answers)


def test_data_parallel_pipelines_draw_in_the_order_of_one_device(world4: World) -> None:
    for answers in world4.run(both, Program("of both", 4), {PP: 2, PARTS: 2, DP: 2}):
        assert_right(answers)


class OfRows(Plain):
    """Draws for every row of what it is given, as SpecAugment does its masks."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"]
        kept = np.random.rand(len(x), 1) + [random.random() for _ in range(x.shape[1])]
        return super().logits({"x": x * torch.from_numpy(kept)})


def of_rows(run: Run) -> None:
    np.random.seed(3)
    random.seed(3)
    run.train(OfRows())


@pytest.mark.parametrize("constraints", [{DP: 2}, {DP: 2, ZERO: 3}], ids=str)
def test_numbers_for_each_row_are_those_of_one_device(
    world2: World, constraints: Constraints
) -> None:
    """What is drawn for rows tells how many they are, so that code runs over all ranks' rows."""
    for answers in world2.run(both, of_rows, constraints):
        assert_right(answers)


class Shuffling(Plain):
    """Draws as many words as values say."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        order = list(range(batch["x"].shape[1]))
        random.shuffle(order)
        return super().logits({"x": batch["x"][:, order]})


class Noisy(Plain):
    """Draws normal numbers, which come in pairs."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().logits(batch) * random.gauss(1.0, 0.1)


def shuffled(run: Run) -> None:
    run.train(Shuffling())


def noisy(run: Run) -> None:
    run.train(Noisy())


def test_numbers_that_come_in_pairs_are_refused(world2: World) -> None:
    message = "forward outside of the blocks draws from Python's random so that .*come in pairs"
    check(world2, ValueError, message, both, noisy, {PP: 2, PARTS: 2})


def test_draws_that_depend_on_values_are_refused(broken2: World) -> None:
    message = "from Python's random otherwise than when .*draw with torch instead"
    check(broken2, Exception, message, both, shuffled, {PP: 2, PARTS: 2})
