"""State that was saved of another optimizer: numbered parameters, another dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from vescale_dtensor import distribute_tensor
from vescale_parallel import ParallelPlan, parallelize

from .test_optimizer import ELEMENTWISE, WORLD, InThreads, give, net, plan, whole, wholes_of


def test_the_state_of_one_device_which_numbers_parameters_goes_on(in_threads: InThreads) -> None:
    make = ELEMENTWISE["Adam"]
    expected, models = net(), [net() for _ in range(WORLD)]
    reference = make(expected.parameters())
    for step in range(2):
        give(expected, step)
        reference.step()
    values, saved = copy.deepcopy((expected.state_dict(), reference.state_dict()))
    give(expected, 2)
    reference.step()
    for model in models:
        model.load_state_dict(values)

    def then(rank: int) -> list[Tensor]:
        model, optimizer = parallelize(plan(), models[rank], lambda m: make(m.parameters()))
        optimizer.load_state_dict(saved)
        give(model, 2)
        optimizer.step()
        return wholes_of(model, optimizer)[0]

    for found in in_threads(WORLD, then):
        for got, parameter in zip(found, expected.parameters(), strict=True):
            assert torch.equal(got, parameter)


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam"])
@pytest.mark.usefixtures("world_of_one")
def test_state_of_another_dtype_becomes_that_of_the_parameters_as_by_torch(name: str) -> None:
    make = ELEMENTWISE[name]
    before = net().float()
    optimizer = make(before.parameters())
    for parameter in before.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected, model = net().bfloat16(), net().bfloat16()
    reference = make(expected.parameters())
    model, loaded = parallelize(ParallelPlan(), model, lambda m: make(m.parameters()))
    reference.load_state_dict(optimizer.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        theirs.grad = torch.ones_like(theirs)
        mine.grad = distribute_tensor(theirs.grad, mine.device_mesh, mine.placements)
    reference.step()
    loaded.step()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(mine.detach()), theirs)
