"""What a step of a parallelized optimizer makes anew, and what its surroundings see."""

from __future__ import annotations

import copy
import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.optim import Optimizer

from vescale_dtensor import CommCounter, DTensor, distribute_tensor
from vescale_parallel import ParallelPlan, parallelize, with_constraints

Make = Callable[[Any], Optimizer]
InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
WIDTH, LAYERS = 3, 20


def net(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).double()


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def one(make: Make = adam, layers: int = 2) -> Any:
    return parallelize(ParallelPlan(), net(layers), lambda m: make(m.parameters()))


def give(model: nn.Module, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        is_cut = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if is_cut else grad


def num_calls(function: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.enable()
    function()
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # pyright: ignore[reportAttributeAccessIssue]: the stubs lack it


class Watched(torch.optim.SGD):
    """Notes what its step is given."""

    seen: list[list[Any]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.seen.append([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def watched(parameters: Any) -> Optimizer:
    optimizer = Watched(parameters, lr=0.1, momentum=0.9)
    optimizer.seen = []
    return optimizer


@pytest.mark.usefixtures("world_of_one")
def test_plain_parameters_are_made_once() -> None:
    model, optimizer = one(watched)
    for step in range(3):
        give(model, step)
        optimizer.step()
    first, *others = optimizer.seen
    assert all(type(p) is nn.Parameter for p in first)
    assert all(p is q for other in others for p, q in zip(first, other, strict=True))
    assert all(p.grad is None for p in first), "gradients must not outlive zero_grad"


@pytest.mark.usefixtures("world_of_one")
def test_a_step_costs_few_calls_besides_torchs() -> None:
    model, optimizer = one(layers=LAYERS)
    plain = net(LAYERS)
    reference = adam(plain.parameters())
    for each, stepping in ((model, optimizer), (plain, reference)):
        give(each)
        stepping.step()
        give(each, 1)
    # 7 a parameter and 100 a step; a parameter made anew each step cost 26 of them.
    bound = num_calls(reference.step) + 8 * 2 * LAYERS + 150
    assert num_calls(optimizer.step) < bound


@pytest.mark.usefixtures("world_of_one")
def test_state_by_public_parameter_is_what_steps_use() -> None:
    model, optimizer = one()
    weight = next(model.parameters())
    give(model)
    optimizer.step()
    held = optimizer.state[weight]["exp_avg"]
    give(model)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"] is held
    optimizer.state[weight] = {}  # begins anew
    give(model)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
    del optimizer.state[weight]
    give(model)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.usefixtures("world_of_one")
def test_state_that_is_replaced_by_one_of_the_same_shape_is_used() -> None:
    model, optimizer = one()
    give(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    give(model, 1)
    optimizer.step()
    optimizer.load_state_dict(saved)
    give(model, 1)
    optimizer.step()
    assert all(values["step"] == 2 for values in optimizer.state.values())


@pytest.mark.usefixtures("world_of_one")
def test_step_hooks_see_distributed_parameters_once() -> None:
    model, optimizer = one(watched)
    seen: list[Any] = []

    def look(given: Any, args: Any, kwargs: Any) -> None:
        assert given is optimizer
        seen.extend(p for group in given.param_groups for p in group["params"])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from here on hooks are around SGD.step, too
    give(model)
    optimizer.step()
    assert [id(p) for p in seen] == [id(p) for p in [*model.parameters()] * 2]


@pytest.mark.usefixtures("world_of_one")
def test_hooks_of_the_state_are_called() -> None:
    model, optimizer = one()
    heard: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: heard.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {name: value for name, value in state.items() if name != "more"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: heard.append("after loading"))
    give(model)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert heard == ["before saving", "after loading"]


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_of_another_model_is_refused_in_a_new_group() -> None:
    _, optimizer = one()
    with pytest.raises(ValueError, match=r"got another tensor of shape \(2,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.usefixtures("world_of_one")
def test_a_new_group_is_stepped_and_saved() -> None:
    def few(model: nn.Module) -> Optimizer:
        first, *_ = model.parameters()
        return torch.optim.Adam([first], lr=0.1)

    model, optimizer = parallelize(ParallelPlan(), net(), few)
    first, second, *others = model.parameters()
    give(model)
    optimizer.step()
    optimizer.add_param_group({"params": second, "lr": 0.2})
    before = [p.detach().full_tensor().clone() for p in (first, second, *others)]
    give(model)
    optimizer.step()
    changed = [
        not torch.equal(p.detach().full_tensor(), b)
        for p, b in zip((first, second, *others), before, strict=True)
    ]
    assert changed == [True, True, False, False]
    assert list(optimizer.state_dict()["state"]) == ["0.weight", "0.bias"]


@pytest.mark.usefixtures("world_of_one")
def test_a_parameter_without_gradient_is_left_alone_and_gets_no_state() -> None:
    make = lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5)  # noqa: E731 (a line)
    model, optimizer = one(make)
    first, *_ = model.parameters()
    give(model)
    first.grad = None
    before = first.detach().full_tensor().clone()
    optimizer.step()
    assert first.grad is None
    assert torch.equal(first.detach().full_tensor(), before)
    assert first not in optimizer.state
    assert "0.weight" not in optimizer.state_dict()["state"]


@pytest.mark.usefixtures("world_of_one")
def test_a_gradient_that_a_step_drops_is_dropped() -> None:
    class Dropping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.zero_grad()

    model, optimizer = one(lambda p: Dropping(p, lr=0.1))
    give(model)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_in_another_placement_is_cut_as_its_parameter_is(in_threads: InThreads) -> None:
    expected, models = net(), [net() for _ in range(2)]
    give(expected)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    plan = with_constraints(ParallelPlan(), {"data_parallel.size": 2})

    def step(rank: int) -> list[Any]:
        model, optimizer = parallelize(
            plan, models[rank], lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
        )
        give(model)
        for p in model.parameters():
            p.grad = p.grad.redistribute(placements=[Replicate()])
        with CommCounter() as counter:
            optimizer.step()
        assert counter.num_collectives == 0
        return [p.detach().full_tensor() for p in model.parameters()]

    for found in in_threads(2, step):
        for got, parameter in zip(found, expected.parameters(), strict=True):
            assert torch.equal(got, parameter)


@pytest.mark.usefixtures("world_of_one")
def test_a_scheduler_that_optimizer_fn_makes_follows_the_step_on_shards() -> None:
    made: list[Any] = []

    def scheduled(parameters: Any) -> Optimizer:
        optimizer = watched(parameters)
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return optimizer

    model, optimizer = one(scheduled)
    give(model)
    optimizer.step()
    made[0].step()  # would warn if no step had been seen
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert all(type(p) is nn.Parameter for p in optimizer.seen[0])


@pytest.mark.usefixtures("world_of_one")
def test_another_function_in_the_place_of_step_is_refused() -> None:
    def replaced(parameters: Any) -> Optimizer:
        optimizer: Any = adam(parameters)
        optimizer.step = lambda: None
        return optimizer

    with pytest.raises(ValueError, match="the step of this Adam was replaced by another function"):
        one(replaced)
