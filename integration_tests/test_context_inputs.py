"""Gradients of what a model is given, where ranks share its sequences: one device's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .contexts import Block
from .experts import adamw
from .plans import CP, DP, Constraints, make_plan
from .programs import assert_right
from .test_bad_input import check
from .training import whole

ROWS, LENGTH, WIDTH = 4, 10, 32
METHOD = "context_parallel.method"


class OnFeatures(nn.Module):
    """Blocks on features, as a language model is given them by a projector; returns a loss."""

    def __init__(self, *, returns_loss: bool) -> None:
        super().__init__()
        self.returns_loss = returns_loss
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        angle_SD = place / torch.arange(1, 9, dtype=x.dtype)
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x, angle_SD.cos(), angle_SD.sin())
        logits = self.head(x)
        if not self.returns_loss:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def start(constraints: Constraints | None, *, returns_loss: bool) -> tuple[Any, Any, int, int]:
    """Return a model, its optimizer, into how many parts a batch is cut, and which this is."""
    torch.manual_seed(0)
    model: Any = OnFeatures(returns_loss=returns_loss).double()
    if constraints is None:
        return model, adamw(model), 1, 0
    plan = make_plan(constraints)
    model, optimizer = vescale.parallelize(plan, model, adamw)
    return model, optimizer, plan.data_parallel.size, vescale.data_parallel_rank(model)


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (ROWS, LENGTH), generator=generator)}


def attacked(constraints: Constraints | None) -> list[Tensor]:
    """Train on inputs that were moved by the gradient of the loss, as FGSM does."""
    model, optimizer, parts, rank = start(constraints, returns_loss=True)
    found: list[Tensor] = []
    for step in range(2):
        whole_batch = batch_of(step)
        batch = {name: tensor.chunk(parts)[rank] for name, tensor in whole_batch.items()}
        x = batch["x"].requires_grad_()
        (grad,) = torch.autograd.grad(model(x, batch["labels"]), x)
        loss = model(x.detach() + 0.1 * grad.sign(), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Rows of other ranks are theirs.
        mine = torch.zeros_like(whole_batch["x"])
        mine.chunk(parts)[rank].copy_(grad)
        found += [mine, whole(loss.detach())]
    return found + [whole(p).detach().clone() for p in model.parameters()]


def projected(constraints: Constraints | None) -> list[Tensor]:
    """Train a projector of the loop's own by what reaches it through the model."""
    model, optimizer, _, _ = start(constraints, returns_loss=False)
    projector = nn.Linear(WIDTH, WIDTH).double()
    own = adamw(projector)
    for step in range(2):
        batch = batch_of(step)
        logits = model(projector(batch["x"]), batch["labels"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    parameters = [*model.parameters(), *projector.parameters()]
    return [whole(p).detach().clone() for p in parameters]


def penalized(constraints: Constraints | None) -> list[Tensor]:
    """Train with a penalty on the gradient of inputs, by products written out."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model, optimizer, _, _ = start(constraints, returns_loss=False)
        for step in range(2):
            batch = batch_of(step)
            x = batch["x"].requires_grad_()
            scores = model(x, batch["labels"])[:, -1, 0]
            (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            norms = grad.flatten(1).norm(dim=1)
            (scores.mean() + (norms - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [whole(p).detach().clone() for p in model.parameters()]


PROGRAMS = {each.__name__: each for each in (attacked, projected, penalized)}


def both(program: str, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    return PROGRAMS[program](constraints), PROGRAMS[program](None)


@pytest.mark.by_day("attacked-ring", "penalized-all_to_all", "projected-all_to_all")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "method"),
    [*product(["attacked", "projected"], ["all_to_all", "ring"]), ("penalized", "all_to_all")],
)
def test_gradients_of_inputs_are_of_the_whole_sequence(
    world2: World, program: str, method: str
) -> None:
    for answers in world2.run(both, program, {CP: 2, METHOD: method}):
        assert_right(answers)


@pytest.mark.slow
def test_a_ring_is_not_differentiated_twice(world2: World) -> None:
    message = "differentiate twice a function"
    check(world2, RuntimeError, message, both, "penalized", {CP: 2, METHOD: "ring"})


def of_both_axes() -> list[list[Tensor]]:
    return [attacked({CP: 2, DP: 2}), attacked(None)]


@pytest.mark.slow
def test_gradients_of_inputs_are_of_this_ranks_rows_and_the_whole_sequence(world4: World) -> None:
    of_ranks = world4.run(of_both_axes)
    for found, expected in of_ranks:
        for index in (0, 2):  # rows that are of another rank are zero
            mine = found[index].flatten(1).any(1)
            assert int(mine.sum()) == ROWS // 2
            expected[index] = expected[index] * mine[:, None, None]
        assert_right((found, expected))
