"""Forwards that write to what they are given, where they run several times in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import parallelize
from vescale_testing import World

from .plans import PARTS, PP, SCHEDULE, VIRTUAL, Constraints, make_plan
from .test_bad_input import check

ROWS, WIDTH, PAD = 4, 6, 0
ACCUMULATION: Constraints = {"batch.gradient_accumulation": 2}
PIPELINES: dict[str, Constraints] = {
    "one part": {PP: 2},
    "parts": {PP: 2, PARTS: 2},
    "interleaved": {PP: 2, PARTS: 2, VIRTUAL: 2, SCHEDULE: "interleaved_1f1b"},
}


class Writes(nn.Module):
    """Scales its inputs in place, and fills the padding of its targets as FSMT does."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(where == "block") for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.where, self.calls = where, 0

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "forward" or (self.where == "later" and self.calls > 1):
            x.mul_(2)
        target.masked_fill_(target == -100, PAD)
        hidden = self.stem(x.clone())  # which backward needs as it is now
        for layer in self.layers:
            hidden = layer(hidden, x)
        return F.cross_entropy(self.head(hidden), target)


class Block(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        if self.writes:
            x.add_(1)
        return hidden + self.linear(hidden).tanh() * x.mean(1, keepdim=True)


def steps(constraints: Constraints | None, where: str = "forward") -> list[Tensor]:
    """Return losses, what is left of the batches, and the gradients of the last step."""
    torch.manual_seed(0)
    model: Any = Writes(where).double()
    if constraints is not None:
        model = parallelize(make_plan(constraints), model)
    found: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        target = torch.randint(0, 5, (ROWS,), generator=generator)
        target[step] = -100
        model.zero_grad()
        loss = model(x, target)
        loss.backward()
        found += [loss.detach(), x, target]
    grads = (p.grad for p in model.parameters())
    whole = (getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads)
    return [*found, *whole]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.by_day("block")
@pytest.mark.parametrize("where", ["forward", "block"])
def test_micro_batches_are_written_to_once(world1: World, where: str) -> None:
    same(world1.run(steps, ACCUMULATION, where)[0], steps(None, where))


@pytest.mark.by_day("one part")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PIPELINES)
def test_every_run_of_a_pipeline_begins_with_its_inputs(world2: World, plan: str) -> None:
    expected = steps(None)
    for found in world2.run(steps, PIPELINES[plan]):
        same(found, expected)


def test_a_write_that_the_first_call_did_not_make_is_refused(world1: World) -> None:
    check(world1, ValueError, "did not in its first call", steps, ACCUMULATION, "later")


class Twice(nn.Module):
    """Ids that are the targets, too, and are written to as these."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        target.masked_fill_(target == 8, 3)
        return F.cross_entropy(self.head(self.table(ids)), target)


def gradients(constraints: Constraints | None) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Twice().double()
    if constraints is not None:
        model = parallelize(make_plan(constraints), model)
    ids = torch.tensor([1, 8, 2, 8])
    model(ids, ids).backward()
    grads = (p.grad for p in model.parameters())
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads]


def test_a_tensor_that_is_given_twice_is_one(world1: World) -> None:
    same(world1.run(gradients, ACCUMULATION)[0], gradients(None))
