"""What a loop computes with parameters: one device's numbers, or refused if ranks would differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import DP, TP, ZERO, Constraints, make_plan
from .training import whole

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
}
DIFFERS = "a plain tensor that differs between data-parallel ranks"


class Features(nn.Module):
    """A backbone, and parameters that its loop computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(16, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


Loop = Callable[[Any, Tensor, Tensor, torch.optim.Optimizer], None]


def _step(loss: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def head_in_the_loop(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    logits = model(x) @ model.head.weight.t() + model.head.bias
    _step(F.cross_entropy(logits, y), optimizer)


def temperature(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    _step((model.scale.exp() * model(x)).square().mean(), optimizer)


def weighted_loss(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss = model(x).square().mean()
    _step(loss * torch.exp(-model.scale) + model.scale, optimizer)


def preconditioned(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    covariance = x.t() @ x / len(x) + torch.eye(8, dtype=x.dtype)
    with torch.no_grad():
        grad = model.embed.weight.grad
        grad.copy_(grad @ covariance)
    optimizer.step()


def penalty(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    decay = sum(p.square().sum() for p in model.parameters())
    _step(model(x).square().mean() + 0.01 * decay, optimizer)


def masked_gradients(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    mask = torch.ones(16, 8, dtype=x.dtype).tril()
    with torch.no_grad():
        model.embed.weight.grad.mul_(mask)
    optimizer.step()


def evaluated(model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        assert (model(x) @ model.head.weight.t()).shape == (len(x), 5)
    _step(model(x).square().mean(), optimizer)


def watched_by_one_rank(
    model: Any, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if not dist.is_initialized() or dist.get_rank() == 0:
        direction = torch.ones(16, dtype=x.dtype)
        assert (model.layers[0][0].bias.grad * direction).shape == (16,)
    optimizer.step()


DIFFERENT = [head_in_the_loop, temperature, weighted_loss, preconditioned]
SAME = [penalty, masked_gradients, evaluated, watched_by_one_rank]


def trained(loop: Loop, constraints: Constraints | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = Features().double()
    x, y = torch.randn(4, 8).double(), torch.randint(0, 5, (4,))
    if constraints is not None:
        plan = make_plan(constraints)
        model = vescale.parallelize(plan, model)
        parts = plan.data_parallel.size
        part = dist.get_rank() // plan.tensor_parallel.size % parts
        x, y = x.chunk(parts)[part], y.chunk(parts)[part]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        # Losses are means over equally many rows, as it asks for.
        warnings.filterwarnings("ignore", message="the module returned no scalar loss")
        for _ in range(3):
            loop(model, x, y, optimizer)
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def refused(loop: Loop, constraints: Constraints) -> str:
    with pytest.raises(ValueError, match=DIFFERS) as error:
        trained(loop, constraints)
    return str(error.value)


def check(world: World, loop: Loop, plan: str) -> None:
    expected = trained(loop, None)
    for found in world.run(trained, loop, PLANS[plan]):
        for name, parameter in expected.items():
            # Sums of two ranks' rows in another order; observed: 2e-16.
            torch.testing.assert_close(found[name], parameter, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.by_day(
    "head_in_the_loop-dp",
    "head_in_the_loop-zero2",
    "head_in_the_loop-zero3",
    "temperature-zero3",
    "weighted_loss-zero2",
    "weighted_loss-zero3",
    "preconditioned-dp",
    "preconditioned-zero2",
    "preconditioned-zero3",
)
@pytest.mark.parametrize("plan", ["dp", "zero2", "zero3"])
@pytest.mark.parametrize("loop", DIFFERENT)
def test_what_a_rank_made_of_its_rows_beside_parameters_is_refused(
    world2: World, loop: Loop, plan: str
) -> None:
    for said in world2.run(refused, loop, PLANS[plan]):
        assert "in test_plain_operands.py, line " in said


@pytest.mark.by_day(
    "penalty-zero2",
    "penalty-tp",
    "masked_gradients-dp",
    "masked_gradients-zero3",
    "masked_gradients-tp",
    "evaluated-tp",
    "watched_by_one_rank-tp",
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", SAME)
def test_what_is_the_same_on_all_ranks_trains_as_on_one_device(
    world2: World, loop: Loop, plan: str
) -> None:
    check(world2, loop, plan)


@pytest.mark.parametrize("loop", DIFFERENT)
def test_tensor_parallel_ranks_share_their_rows(world2: World, loop: Loop) -> None:
    check(world2, loop, "tp")
