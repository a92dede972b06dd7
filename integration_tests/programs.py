"""Small programs on one device and under a plan: right on every rank, or refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .short_group import in_short_group
from .training import whole

PIPELINE: Constraints = {PP: 2, PARTS: 2}
TENSOR: Constraints = {TP: 2}
DATA: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
}
ALL = {**DATA, "pp": PIPELINE}
WIDTH = 8
aten = torch.ops.aten
# A rank that did not see the fault itself names the one that did.
REFUSALS = (ValueError, TypeError, NotImplementedError, vescale.PeerError)


@dataclass
class Run:
    """A training run on one device (no constraints) or as one rank under a plan.

    Attributes:
        constraints: Of the plan.
        results: What came out so far, in order.
    """

    constraints: Constraints | None
    results: list[Tensor] = field(default_factory=list[Tensor])

    def start(
        self, model: nn.Module, optimizer_fn: Callable[[nn.Module], Optimizer] | None = None
    ) -> tuple[Any, Optimizer]:
        model, optimizer_fn = model.double(), optimizer_fn or sgd
        if self.constraints is None:
            return model, optimizer_fn(model)
        return vescale.parallelize(make_plan(self.constraints), model, optimizer_fn)

    def part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of a global batch."""
        replicas = (self.constraints or {}).get(DP, 1)
        # Stages of a pipeline are the outermost axis, tensor-parallel ranks the innermost one.
        inner = (self.constraints or {}).get(TP, 1)
        rank = int(os.environ["RANK"]) // inner % replicas if replicas > 1 else 0
        return {name: tensor.chunk(replicas)[rank] for name, tensor in batch.items()}

    def keep(self, value: Tensor) -> None:
        self.results.append(whole(value).to(torch.float64).clone())

    def train(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
        given: list[dict[str, Tensor]] | None = None,
    ) -> None:
        """Take three ordinary steps."""
        model, optimizer = self.start(model, optimizer_fn)
        for batch in given or rows():
            loss = model(self.part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.keep(loss)
        self.finish(model)

    def finish(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.keep(parameter)


Program = Callable[[Run], None]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def rows(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
            for name in ("x", "y")
        }
        for _ in range(count)
    ]


def both(program: Program, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    """Run a program under a plan and, on the same rank, as on one device."""
    answers: list[list[Tensor]] = []
    with warnings.catch_warnings():
        # What is right in spite of a warning passes, what is wrong in spite of one does not.
        warnings.simplefilter("ignore")
        for each in (constraints, None):
            torch.manual_seed(0)
            run = Run(each)
            program(run)
            answers.append(run.results)
    return answers[0], answers[1]


def attempt(
    program: Program, constraints: Constraints
) -> tuple[list[Tensor], list[Tensor]] | type[Exception]:
    try:
        return both(program, constraints)
    except REFUSALS as error:
        return type(error)


def assert_right(answers: tuple[list[Tensor], list[Tensor]]) -> None:
    found, expected = answers
    assert expected
    # Rounding of float64 over a few steps on values of order 1.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def right(world: World, program: Program, constraints: Constraints) -> None:
    for answers in world.run(both, program, constraints):
        assert_right(answers)


def right_or_refused(world: World, program: Program, constraints: Constraints) -> None:
    with TemporaryDirectory() as directory:
        answers = world.run(in_short_group, directory, attempt, program, constraints)
        world.close()
    if any(isinstance(answer, type) and answer is not vescale.PeerError for answer in answers):
        assert all(isinstance(answer, type) for answer in answers), answers
        return
    for answer in answers:
        assert not isinstance(answer, type), answers
        assert_right(answer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Plain(nn.Module):
    """What every plan can run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self.logits(batch), batch["y"])


class Penalty(Plain):
    """Decays its parameters in its own forward, before or after the blocks."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def penalty(self) -> Tensor:
        return 0.01 * torch.stack([p.square().sum() for p in self.blocks.parameters()]).sum()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.first:
            return self.penalty() + super().forward(batch)
        return super().forward(batch) + self.penalty()


def penalty_first(run: Run) -> None:
    run.train(Penalty(first=True))


def penalty_last(run: Run) -> None:
    run.train(Penalty(first=False))
