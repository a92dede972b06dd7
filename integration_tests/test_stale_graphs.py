"""Backward through a forward of before parameters changed: refused where one device refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import vescale
from vescale_testing import World

from .plans import COPIES, DP, PARTS, PP, SCHEDULE, TP, TWO, ZERO, Constraints, make_plan
from .training import whole

pytestmark = pytest.mark.slow

X = torch.arange(32.0, dtype=torch.float64).view(4, 8) / 10
Y = X.flip(0)


class Net(nn.Module):
    """Blocks and a head that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head, self.other = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, *, own: str = "head") -> Tensor:
        for block in self.blocks if own == "head" else ():
            x = block(x)
        return self.get_submodule(own)(x).mean()


class AllBlocks(Net):
    """All calls run the blocks, as a pipeline needs them."""

    def forward(self, x: Tensor, *, own: str = "head") -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.get_submodule(own)(x).mean()


def step_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    model(x).backward()
    loss = model(y)
    optimizer.step()
    loss.backward()


def step_and_forward_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    model(x).backward()
    loss = model(y)
    optimizer.step()
    optimizer.zero_grad()
    model(x)
    loss.backward()


def write_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(y)
    with torch.no_grad():
        model.blocks[1][0].weight.mul_(2)
    loss.backward()


def write_and_evaluate_then_backward(
    model: Any, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    loss = model(y)
    with torch.no_grad():
        model.blocks[1][0].weight.mul_(2)
        model(x)
    loss.backward()


def two_forwards_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    first, second = model(x), model(y)
    (first + second).backward()


def evaluate_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x)
    with torch.no_grad():
        model(y)
    loss.backward()


def step_of_others_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """The step has gradients of a head that the graph is not of."""
    model(x, own="other").backward()
    loss = model(y)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def write_to_others_then_backward(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x)
    with torch.no_grad():
        model.other.weight.mul_(2)
    loss.backward()


def backward_twice(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


REFUSED = (
    step_then_backward, step_and_forward_then_backward, write_then_backward,
    write_and_evaluate_then_backward,
)  # fmt: skip
RIGHT = (
    two_forwards_then_backward, evaluate_then_backward, step_of_others_then_backward,
    write_to_others_then_backward, backward_twice,
)  # fmt: skip
STALE = "modified by an inplace operation"


Program = Callable[[Any, Optimizer, Tensor, Tensor], None]


def _outcomes(
    model: nn.Module,
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
    programs: Sequence[Program] = (*REFUSED, *RIGHT),
) -> Iterator[list[Tensor] | str]:
    """Give what each program comes to: the gradients, or the error; train a step after each."""
    for program in programs:
        said = ""
        try:
            program(model, optimizer, x, y)
        except RuntimeError as error:
            said = STALE if STALE in str(error) else str(error)
        yield said or [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield [whole(p).clone() for p in model.parameters()]


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def _model(net: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return net().double()


def _compared(constraints: Constraints, in_call: bool = False) -> None:
    # With ``in_call`` gradients are computed in the call, which keeps no graph.
    programs = [each for each in (*REFUSED, *RIGHT) if not in_call or each is not backward_twice]
    net = AllBlocks if in_call else Net
    alone = _model(net)
    expected = [*_outcomes(alone, _sgd(alone), X, Y, programs)]
    assert expected[: 2 * len(REFUSED) : 2] == [STALE] * len(REFUSED)
    plan = make_plan(constraints)
    model, optimizer = vescale.parallelize(plan, _model(net), _sgd)
    ranks, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
    found = [*_outcomes(model, optimizer, X.chunk(ranks)[rank], Y.chunk(ranks)[rank], programs)]
    for own, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert own == other
        else:
            # Float64; means of ranks' rows are added up in another order than those of all rows.
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


PLANS: dict[str, Constraints] = {
    **{name: TWO[name] for name in ("dp", "zero1", "zero2", "zero3")},
    "prefetched": {DP: 2, ZERO: 3, "data_parallel.prefetch": 2},
    "kept": {DP: 2, ZERO: 3, "data_parallel.reshard_after_forward": False},
    "host": {DP: 2, ZERO: 3, "data_parallel.offload": "parameters"},
}
AT_NIGHT = ("zero2", "prefetched", "kept")


@pytest.mark.by_day("dp", "zero1")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in PLANS],
)
def test_what_one_device_refuses_is_refused(world2: World, name: str) -> None:
    world2.run(_compared, PLANS[name])


def _written_as_data(constraints: Constraints) -> None:
    """One device differentiates with what was written; ranks whose shards are apart cannot."""
    model, _ = vescale.parallelize(make_plan(constraints), _model(), _sgd)
    rank = vescale.data_parallel_rank(model)
    x = X.chunk(2)[rank]
    loss = model(x)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    with pytest.raises(RuntimeError, match=STALE):
        loss.backward()
    alone = _model()
    for parameter in alone.parameters():
        parameter.data.mul_(2)
    alone(X).backward()
    model(x).backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        if own.grad is not None and other.grad is not None:
            torch.testing.assert_close(whole(own.grad), other.grad, rtol=1e-12, atol=1e-14)


def test_what_is_written_as_data_is_not_mixed_with_what_was_gathered(world2: World) -> None:
    world2.run(_written_as_data, {DP: 2, ZERO: 1})


ACCUMULATED = "batch.gradient_accumulation"
IN_CALL: dict[str, Constraints] = {
    "pp": {PP: 2, PARTS: 2},
    "accumulated": {DP: 2, ACCUMULATED: 2},
    "gpipe": {PP: 2, PARTS: 2, SCHEDULE: "gpipe"},
    "accumulated, zero3": {DP: 2, ZERO: 3, ACCUMULATED: 2},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name not in ("pp", "accumulated")))
        for name in IN_CALL
    ],
)
def test_gradients_of_a_call_are_not_handed_out_after_a_write(world2: World, name: str) -> None:
    world2.run(_compared, IN_CALL[name], True)


@pytest.mark.nightly
def test_pipelines_on_four_ranks_refuse_it(world4: World) -> None:
    for more in ({}, {ZERO: 2}, {ZERO: 3}):
        world4.run(_compared, {DP: 2, **IN_CALL["pp"], **more}, True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "constraints", [{DP: 4, ZERO: 3, COPIES: 2}, {TP: 2, DP: 2, ZERO: 1}], ids=["hybrid", "tp"]
)
def test_four_ranks_refuse_it(world4: World, constraints: Constraints) -> None:
    world4.run(_compared, constraints)
