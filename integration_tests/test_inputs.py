"""Ranks that work on the same rows are given the same ones, data-parallel ranks are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import vescale
from vescale_parallel import parallelize
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check

WIDTH = 8
SHARED: dict[str, Constraints] = {"tp": {TP: 2}, "pp": {PP: 2, PARTS: 2}}
SHARED_OF_FOUR: dict[str, Constraints] = {
    "tp-pp": {TP: 2, PP: 2, PARTS: 2},
    "tp-dp": {TP: 2, DP: 2},
    "pp-zero3": {PP: 2, PARTS: 2, DP: 2, ZERO: 3},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor, *, scale: Any = 1.0) -> Tensor:
        return F.mse_loss(self.blocks(x) * scale, y)


def rows(seed: int, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator)


def train(model: nn.Module, *args: Any, steps: int = 1, **kwargs: Any) -> None:
    for _ in range(steps):
        model(*args, **kwargs).backward()


def differ(constraints: Constraints, kind: str) -> None:
    model = vescale.parallelize(make_plan(constraints), Net())
    odd = dist.get_rank() == dist.get_world_size() - 1
    x, y = rows(0), rows(1)
    if kind == "rows":
        train(model, rows(2) if odd else x, y)
    elif kind == "later":
        train(model, x, y, steps=3)
        train(model, x, rows(2) if odd else y)
    elif kind == "much_later":
        train(model, x, y, steps=64)
        train(model, x, rows(2) if odd else y)
    elif kind == "shape":
        train(model, x[:2] if odd else x, y[:2] if odd else y)
    elif kind == "dtype":
        train(model, x, y, scale=torch.ones((), dtype=torch.float64 if odd else torch.float32))
    elif kind == "value":
        train(model, x, y, scale=0.5 if odd else 1.0)
    elif kind == "keys":
        model(x, y).backward() if odd else model(x, y, scale=1.0).backward()
    elif kind == "order":
        train(model, x.flip(0) if odd else x, y)


DIFFERENCES = {
    "rows": r"x \(float32 \(4, 8\)\) has one value on rank 0, another on rank 1.*call number 0",
    "later": r"y .* has one value on rank 0, another on rank 1.*call number 3",
    "much_later": r"y .* has one value on rank 0, another on rank 1.*call number 64",
    "shape": r"x is float32 \(4, 8\) on rank 0, float32 \(2, 8\) on rank 1",
    "dtype": r"scale is float32 \(\) on rank 0, float64 \(\) on rank 1",
    "value": r"scale is 1.0 on rank 0, 0.5 on rank 1",
    "keys": r"scale was given on rank 0 and not on rank 1",
    "order": r"x .* has one value on rank 0, another on rank 1",
}


@pytest.mark.by_day("dtype-pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", SHARED)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_that_share_rows_and_get_others_say_which_argument_differs(
    world2: World, kind: str, plan: str
) -> None:
    check(world2, ValueError, DIFFERENCES[kind], differ, SHARED[plan], kind)


def last_of_four(constraints: Constraints) -> None:
    model = vescale.parallelize(make_plan(constraints), Net())
    train(model, rows(2 if dist.get_rank() == 3 else 0), rows(1))


@pytest.mark.slow
def test_all_ranks_name_those_that_differ(world4: World) -> None:
    message = r"x \(float32 \(4, 8\)\) has one value on ranks \[0, 1, 2\], another on rank 3"
    check(world4, ValueError, message, last_of_four, SHARED_OF_FOUR["tp-pp"])


def looks_late() -> list[str]:
    """Compare as on a GPU, where what a call sent is looked at in the next one."""
    model: Any = vescale.parallelize(make_plan({TP: 2}), Net())
    model._vescale_engine.inputs._is_delayed = True
    train(model, rows(0), rows(1))
    train(model, rows(2 + dist.get_rank()), rows(1))
    said: list[str] = []
    for _ in range(2):
        try:
            train(model, rows(0), rows(1))
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_a_call_may_be_compared_in_the_next(world2: World) -> None:
    for said in world2.run(looks_late):
        assert len(said) == 1
        assert "in call number 1 of the model" in said[0]


def epoch(constraints: Constraints, *, by_position: bool) -> list[float]:
    """Train with a sampler of one's own."""
    torch.manual_seed(0)
    plan = make_plan(constraints)
    model = vescale.parallelize(plan, Net().double())
    data = TensorDataset(rows(0, 16).double(), rows(1, 16).double())
    replicas = plan.data_parallel.size if by_position else None
    rank = vescale.data_parallel_rank(model) if by_position else None
    sampler = DistributedSampler(data, replicas, rank, shuffle=False)
    losses: list[float] = []
    for x, y in DataLoader(data, 4 // plan.data_parallel.size, sampler=sampler):
        loss = model(x, y)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.by_day("pp-zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", SHARED_OF_FOUR)
def test_a_sampler_that_goes_by_the_data_parallel_rank_gives_one_devices_losses(
    world4: World, plan: str
) -> None:
    torch.manual_seed(0)
    model, x, y = Net().double(), rows(0, 16).double(), rows(1, 16).double()
    expected = [model(x[i : i + 4], y[i : i + 4]).item() for i in range(0, 16, 4)]
    for losses in world4.run(epoch_by_position, SHARED_OF_FOUR[plan]):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


def epoch_by_position(constraints: Constraints) -> list[float]:
    return epoch(constraints, by_position=True)


def epoch_by_rank(constraints: Constraints) -> None:
    epoch(constraints, by_position=False)


@pytest.mark.by_day("pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", SHARED)
def test_a_sampler_that_goes_by_the_rank_is_refused(world2: World, plan: str) -> None:
    message = r"x \(float64.*data_parallel_rank\(model\)"
    check(world2, ValueError, message, epoch_by_rank, SHARED[plan])


def warned(constraints: Constraints, same: bool) -> list[tuple[str, str]]:
    model = vescale.parallelize(make_plan(constraints), Net())
    position = 0 if same else vescale.data_parallel_rank(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for step in range(4):
            loss = model(rows(10 * step + position), rows(5))
            loss.backward()
    return [(str(each.message), each.filename) for each in caught]


@pytest.mark.by_day("dp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}], ids=["dp", "zero3"])
def test_data_parallel_ranks_with_the_same_batch_are_warned_of_once(
    world2: World, plan: Constraints
) -> None:
    for caught in world2.run(warned, plan, True):
        assert len(caught) == 1
        assert "2 data-parallel ranks were called with 1 different batches" in caught[0][0]
        assert caught[0][1].endswith("test_inputs.py")
    assert world2.run(warned, plan, False) == [[], []]


def one_rank_alone() -> None:
    model = vescale.parallelize(make_plan({DP: 2}), nn.Linear(WIDTH, WIDTH))
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(rows(0))
    dist.barrier()


@pytest.mark.slow
def test_a_data_parallel_rank_may_evaluate_alone(world2: World) -> None:
    world2.run(one_rank_alone_without_warning)


def one_rank_alone_without_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_rank_alone()


class Shifted(nn.Module):
    """Adds something that rows share to what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor, shift: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x) + shift, labels)


def shifted(plan: dict[str, Any] | None) -> list[float]:
    model: Any = Shifted().double()
    if plan is not None:
        model = parallelize(make_plan(plan), model)
    torch.manual_seed(1)
    x, shift = torch.rand(8, 5, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    call = {"x": x, "shift": shift, "labels": torch.arange(8) % 4}
    orders = ("x", "shift", "labels"), ("labels", "shift", "x"), ("shift", "labels", "x")
    losses: list[float] = []
    for order in orders:
        loss = model(**{name: call[name] for name in order})
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def test_arguments_come_in_any_order() -> None:
    """Micro-batches are cut by what each is, not by where another one was before."""
    (found,) = vescale.emulate(shifted, 1, args=({"batch.gradient_accumulation": 2},))
    torch.testing.assert_close(found, shifted(None), rtol=1e-14, atol=0)
