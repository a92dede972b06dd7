"""Steps of torch's optimizers that a program makes after ``parallelize``."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import DTensor, distribute_tensor
from vescale_parallel import ParallelPlan, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
Make = Callable[[Any], Optimizer]
MAKES: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "adamw-loop": partial(torch.optim.AdamW, lr=0.1, foreach=False, maximize=True),
    "adam-lr": partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, foreach=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "adadelta": partial(torch.optim.Adadelta, foreach=True),
    "adamax": partial(torch.optim.Adamax, foreach=True),
    "nadam": partial(torch.optim.NAdam, foreach=True),
    "radam": partial(torch.optim.RAdam, foreach=True),
    "rprop": partial(torch.optim.Rprop, foreach=True),
    "asgd": partial(torch.optim.ASGD, foreach=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1)).double()


def give(model: nn.Module, step: int) -> None:
    """Give gradients, in the second step not to the first layer."""
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        is_cut = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if is_cut else grad
        if step == 1 and index < 2:
            p.grad = None


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def parallel(stage: int, model: nn.Module) -> nn.Module:
    sizes = {"data_parallel.size": 2, "data_parallel.zero_stage": stage}
    return parallelize(with_constraints(ParallelPlan(), sizes), model)


def steps(model: nn.Module, make: Make) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return parameters and their state after steps, beside a plain parameter in a group."""
    beside = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = make([{"params": [*model.parameters()]}, {"params": [beside], "lr": 0.01}])
    for step in range(4):
        give(model, step)
        beside.grad = torch.full_like(beside, float(step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    held = [*model.parameters(), beside]
    state = [{n: whole(v) for n, v in optimizer.state[p].items()} for p in held]
    for p in model.parameters():
        values = [v for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.dim()]
        assert all(isinstance(v, DTensor) == isinstance(p, DTensor) for v in values)
    return [whole(p.detach()) for p in held], state


@pytest.mark.parametrize(("name", "stage"), [("adamw", 0), *((name, 3) for name in MAKES)])
def test_they_are_one_devices(in_threads: InThreads, name: str, stage: int) -> None:
    expected, kept = steps(net(), MAKES[name])
    models = [net() for _ in range(2)]

    def check(rank: int) -> None:
        found, state = steps(parallel(stage, models[rank]), MAKES[name])
        for each, alone in zip(found, expected, strict=True):
            assert torch.equal(each, alone)
        for each, alone in zip(state, kept, strict=True):
            assert each.keys() == alone.keys()
            for key, value in each.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(alone[key])), key

    in_threads(2, check)


class Dispatched(TorchDispatchMode):
    """Counts operators, and those of distributed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.distributed = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_distributed = any(issubclass(each, DTensor) for each in types)
        self.plain += not is_distributed
        self.distributed += is_distributed
        return func(*args, **(kwargs or {}))


def num_dispatched(model: nn.Module, optimizer: Optimizer) -> Dispatched:
    give(model, 0)
    optimizer.step()  # makes state
    give(model, 2)
    with Dispatched() as counted:
        optimizer.step()
    return counted


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_no_operator_of_a_step_is_one_of_distributed_tensors(
    in_threads: InThreads, cls: Callable[..., Optimizer], foreach: bool
) -> None:
    make = partial(cls, foreach=foreach)
    model = net()
    expected = num_dispatched(model, make(model.parameters()))
    models = [net() for _ in range(2)]

    def check(rank: int) -> None:
        own = parallel(3, models[rank])
        counted = num_dispatched(own, make(own.parameters()))
        assert counted.distributed == 0
        assert counted.plain == expected.plain

    in_threads(2, check)


class Doubled(torch.optim.AdamW):
    """A program's own, of which nothing is known."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                assert isinstance(p, DTensor)


@pytest.mark.usefixtures("world_of_one")
def test_what_is_not_torchs_steps_on_distributed_tensors() -> None:
    model = parallelize(ParallelPlan(), net())
    optimizer = Doubled(model.parameters())
    give(model, 0)
    optimizer.step()
    assert "_init_group" not in vars(optimizer)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_an_optimizer_is_freed_with_its_last_name(name: str) -> None:
    model = parallelize(ParallelPlan(), net())
    optimizer = MAKES[name](model.parameters())
    give(model, 0)
    optimizer.step()
    seen = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert seen() is None
    finally:
        gc.enable()
