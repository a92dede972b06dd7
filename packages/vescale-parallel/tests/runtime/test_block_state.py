"""Optimizers that quantise blocks of elements run on shards that cut no block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor, distribute_tensor
from vescale_parallel import ParallelPlan, declare_optimizer, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
BLOCK = 256


class Adam8bit(Optimizer):
    """Keeps its averages in 8 bits, and the largest of each block of 256 in full."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], *group["betas"])

    def _update(self, p: Tensor, lr: float, beta1: float, beta2: float) -> None:
        state, grad = self.state[p], p.grad
        assert grad is not None
        if not state:
            count = -(-p.numel() // BLOCK)
            for name in ("first", "second"):
                state[name] = torch.zeros_like(p, dtype=torch.int8)
                state[name + "_scale"] = torch.zeros(count, dtype=p.dtype, device=p.device)
        first = dequantised(state["first"], state["first_scale"])
        second = dequantised(state["second"], state["second_scale"])
        first.lerp_(grad, 1 - beta1)
        second.lerp_(grad.square(), 1 - beta2)
        p.sub_(lr * first / (second.sqrt() + 1e-3))
        for name, value in (("first", first), ("second", second)):
            quantise(value, state[name], state[name + "_scale"])


class Other(Adam8bit):
    def step(self, closure: Any = None) -> None:
        super().step()


class OtherLate(Other):
    def step(self, closure: Any = None) -> None:
        super().step()


class Sharing(Adam8bit):
    """Has a state of another shape."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["table"] = torch.arange(5.0)


@pytest.fixture(autouse=True)
def blocks_of_these_tests() -> Iterator[None]:
    """Have models of other tests cut as they would be."""
    yield
    for each in (Adam8bit, Other, OtherLate, Sharing):
        declare_optimizer(each, updates="elements")


def blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def dequantised(held: Tensor, scale: Tensor) -> Tensor:
    return (blocks(held) * scale[:, None]).view(-1)[: held.numel()].view(held.shape)


def quantise(values: Tensor, held: Tensor, scale: Tensor) -> None:
    parts = blocks(values)
    scale.copy_(parts.abs().amax(1) / 127)
    rounded = (parts / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8)
    held.copy_(rounded.view(-1)[: held.numel()].view(held.shape))


class Uneven(nn.Module):
    """Rows shorter than a block, as long as two, of no common length; less than one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(2.0))
        for index, shape in enumerate([(7, 100), (300,), (33, 65), (5, 512), (3,), (4, 3, 40)]):
            setattr(self, f"p{index}", nn.Parameter(torch.randn(shape)))


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def one_device(steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    model = Uneven()
    optimizer = Adam8bit(model.parameters())
    for step in range(steps):
        for p, grad in zip(model.parameters(), gradients(model, step), strict=True):
            p.grad = grad
        optimizer.step()
    state = {fqn: optimizer.state[p] for fqn, p in model.named_parameters()}
    return [p.detach() for p in model.parameters()], state


def take(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        for p, grad in zip(model.parameters(), gradients(model, step), strict=True):
            held: Any = p
            p.grad = distribute_tensor(grad, held.device_mesh, held.placements)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    return [whole(p.detach()) for p in model.parameters()]


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def parallel(model: nn.Module, plan: dict[str, Any]) -> Any:
    declare_optimizer(Adam8bit, updates="elements", block_numel=BLOCK)
    constraints = {f"data_parallel.{key}": value for key, value in plan.items()}
    return parallelize(with_constraints(ParallelPlan(), constraints), model, Adam8bit)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for fqn, state in expected.items():
        assert found[fqn].keys() == state.keys()
        assert all(torch.equal(found[fqn][name], state[name]) for name in state), fqn


@pytest.mark.parametrize(
    "plan",
    [
        {"size": 2, "zero_stage": 1},
        {"size": 3, "zero_stage": 2},
        {"size": 3, "zero_stage": 3},
        {"size": 4, "zero_stage": 3, "replicate_size": 2},
        {"size": 4, "zero_stage": 3, "replicate_size": 2, "replicate_zero_stage": 1},
    ],
    ids=str,
)
def test_values_and_states_are_those_of_one_device(
    in_threads: InThreads, plan: dict[str, Any]
) -> None:
    values, states = one_device(4)
    models = [Uneven() for _ in range(plan["size"])]

    def on_rank(rank: int) -> Any:
        model, optimizer = parallel(models[rank], plan)
        found = take(model, optimizer, range(4))
        held = [len(p.to_local().reshape(-1)) for p in model.parameters()]
        return found, whole(optimizer.state_dict()["state"]), held

    ranks = in_threads(plan["size"], on_rank)
    for found, state, _ in ranks:
        assert all(map(torch.equal, found, values))
        assert_same(state, states)
    assert len({tuple(held) for _, _, held in ranks}) > 1


def test_states_go_on_under_another_world_size(in_threads: InThreads) -> None:
    values, states = one_device(4)
    models = [Uneven() for _ in range(7)]

    def first(rank: int) -> Any:
        model, optimizer = parallel(models[rank], {"size": 3, "zero_stage": 3})
        take(model, optimizer, range(2))
        saved = optimizer.state_dict()
        weights = {fqn: whole(p.detach()) for fqn, p in model.named_parameters()}
        shapes = {
            f"state.{fqn}.{name}": value
            for fqn, state in saved["state"].items()
            for name, value in state.items()
        }
        return weights, {**saved, "state": whole(saved["state"])}, whole(shapes)

    weights, saved, listed = in_threads(3, first)[0]

    def then(rank: int) -> Any:
        model, optimizer = parallel(models[3 + rank], {"size": 4, "zero_stage": 1})
        for fqn, p in model.named_parameters():
            with torch.no_grad():
                p.copy_(distribute_tensor(weights[fqn], p.device_mesh, p.placements))
        empty = optimizer.state_template(listed)["state"]
        optimizer.load_state_dict(saved)
        found = take(model, optimizer, range(2, 4))
        held = optimizer.state_dict()["state"]
        for fqn, state in held.items():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    assert empty[fqn][name].placements == value.placements
        return found, whole(held)

    for found, state in in_threads(4, then):
        assert all(map(torch.equal, found, values))
        assert_same(state, states)


@pytest.mark.parametrize(
    ("block", "message"),
    [(1, "Other is declared to update elements, but on a small"), (128, "on a small example")],
)
def test_blocks_of_another_length_are_refused(
    in_threads: InThreads, block: int, message: str
) -> None:
    declare_optimizer(Other, updates="elements", block_numel=block)
    models = [Uneven() for _ in range(2)]
    plan = with_constraints(
        ParallelPlan(), {"data_parallel.size": 2, "data_parallel.zero_stage": 1}
    )

    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            parallelize(plan, models[rank], Other)

    in_threads(2, on_rank)


def test_blocks_that_are_declared_too_late_are_refused(in_threads: InThreads) -> None:
    models = [Uneven() for _ in range(2)]
    plan = with_constraints(
        ParallelPlan(), {"data_parallel.size": 2, "data_parallel.zero_stage": 3}
    )

    def on_rank(rank: int) -> None:
        def late(model: nn.Module) -> Optimizer:
            declare_optimizer(OtherLate, updates="elements", block_numel=1000)
            return OtherLate(model.parameters())

        with pytest.raises(ValueError, match=r"OtherLate updates 1000 .* before parallelize"):
            parallelize(plan, models[rank], late)

    in_threads(2, on_rank)


@pytest.mark.parametrize(("block", "updates"), [(0, "elements"), (256, "parameters")])
def test_blocks_that_make_no_sense_are_refused(block: int, updates: Any) -> None:
    with pytest.raises(ValueError, match="expected block_numel of at least 1, and above 1 with"):
        declare_optimizer(Other, updates=updates, block_numel=block)


def test_other_state_is_refused_as_before(in_threads: InThreads) -> None:
    declare_optimizer(Sharing, updates="elements", block_numel=BLOCK)
    models = [Uneven() for _ in range(2)]
    plan = with_constraints(
        ParallelPlan(), {"data_parallel.size": 2, "data_parallel.zero_stage": 1}
    )

    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'table' of shape \(5,\) belongs to a whole"):
            parallelize(plan, models[rank], Sharing)

    in_threads(2, on_rank)


def test_parts_of_tensor_parallel_ranks_are_refused(in_threads: InThreads) -> None:
    declare_optimizer(Adam8bit, updates="elements", block_numel=BLOCK)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    models = [first, copy.deepcopy(first)]
    plan = with_constraints(
        ParallelPlan(),
        {
            "tensor_parallel.size": 2,
            "tensor_parallel.sharding_plan": {
                "0.weight": "Shard(0)",
                "0.bias": "Shard(0)",
                "2.weight": "Shard(1)",
            },
        },
    )

    def on_rank(rank: int) -> None:
        with pytest.raises(ValueError, match=r"Adam8bit updates 256 .* tensor or expert"):
            parallelize(plan, models[rank], Adam8bit)

    in_threads(2, on_rank)
