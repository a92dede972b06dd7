"""What a loop trains, or multiplies losses with, beside a data-parallel model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from vescale_testing import World

from .plans import DP, ZERO, Constraints
from .programs import PIPELINE, TENSOR, WIDTH, Plain, Program, Run, both, right, rows
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulated": {DP: 2, "batch.gradient_accumulation": 2},
}


class Features(Plain):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.logits(batch)


def _step(loss: Tensor, *optimizers: Optimizer) -> None:
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def head(run: Run) -> None:
    """A head of its own reads what the model returns."""
    beside = nn.Linear(WIDTH, WIDTH).double()
    model, steps = run.start(Features())
    own = SGD(beside.parameters(), lr=0.1)
    for batch in rows():
        part = run.part(batch)
        _step(F.mse_loss(beside(model(part)), part["y"]), steps, own)


def averaged(run: Run) -> None:
    """Likewise, and the loop averages its gradients itself."""
    beside = nn.Linear(WIDTH, WIDTH).double()
    model, steps = run.start(Features())
    own = SGD(beside.parameters(), lr=0.1)
    for batch in rows():
        part = run.part(batch)
        F.mse_loss(beside(model(part)), part["y"]).backward()
        for parameter in beside.parameters() if run.constraints else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        for each in (steps, own):
            each.step()
            each.zero_grad()
    run.finish(model)
    run.finish(beside)


def prompt(run: Run) -> None:
    """A prompt is trained in front of a frozen model."""
    model, _ = run.start(Plain().requires_grad_(requires_grad=False))
    beside = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    for batch in rows():
        part = run.part(batch)
        _step(model({"x": part["x"] + beside, "y": part["y"]}), SGD([beside], lr=0.1))


def perturbed(run: Run) -> None:
    """Every row has a perturbation, which an optimizer makes."""
    model, steps = run.start(Plain())
    for batch in rows():
        part = run.part(batch)
        beside = torch.zeros_like(part["x"], requires_grad=True)
        own = SGD([beside], lr=0.1)
        for _ in range(2):
            _step(-model({"x": part["x"] + beside, "y": part["y"]}), own)
        steps.zero_grad()
        _step(model({"x": part["x"] + beside.detach(), "y": part["y"]}), steps)
    run.finish(model)


def weighed(run: Run) -> None:
    """The returned loss is weighed by a number that is trained: of all rows, so alike."""
    model, steps = run.start(Plain())
    beside = nn.Parameter(torch.zeros((), dtype=torch.float64))
    own = SGD([beside], lr=0.1)
    for batch in rows():
        loss = model(run.part(batch))
        _step(loss * torch.exp(-beside) + beside, steps, own)
    run.finish(model)
    run.keep(beside.detach())


def counted(run: Run) -> None:
    """As loops for other kinds of data parallelism, which average over ranks."""
    model, steps = run.start(Plain())
    for batch in rows():
        part = run.part(batch)
        count = part["x"].abs().sum().item()  # stands for the number of targets of this rank
        _step(model(part) * count, steps)


def scaled(run: Run) -> None:
    model, steps = run.start(Plain())
    for number, batch in enumerate(rows(), 1):
        loss = model(run.part(batch))
        _step(loss * number / loss.detach(), steps)
    run.finish(model)


@pytest.mark.by_day("head-zero3", "prompt-dp", "prompt-zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
@pytest.mark.parametrize("program", [head, prompt])
def test_what_each_rank_would_train_by_its_own_rows_is_refused(
    world2: World, program: Program, plan: str
) -> None:
    message = (
        r"that SGD.step updates in test_trained_beside.py, line \d+ .* trained beside a data-"
    )
    check(world2, ValueError, message, both, program, PLANS[plan])


@pytest.mark.by_day("averaged")
@pytest.mark.slow
@pytest.mark.parametrize("program", [averaged, perturbed, weighed, scaled])
def test_what_ranks_train_alike_or_for_rows_trains_as_on_one_device(
    world2: World, program: Program
) -> None:
    for plan in ("dp", "zero3"):
        right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_of_all_ranks_that_each_multiplies_otherwise_is_refused(
    world2: World, plan: str
) -> None:
    message = "is the mean over all data-parallel ranks already, and was multiplied with another"
    check(world2, ValueError, message, both, counted, PLANS[plan])


@pytest.mark.slow
def test_ranks_that_share_rows_train_what_is_beside_alike(world2: World) -> None:
    right(world2, weighed, TENSOR)
    right(world2, weighed, PIPELINE)
