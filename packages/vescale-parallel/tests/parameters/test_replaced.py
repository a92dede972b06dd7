"""Optimizers of a process in which parallelize replaced parameters, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from vescale_parallel import ParallelPlan, parallelize

pytestmark = pytest.mark.usefixtures("world_of_one")


def compiled_step(optimizer: SGD) -> Callable[[], Any]:
    """Compile a function, as a program does its whole step."""

    def step() -> None:
        optimizer.step()

    return torch.compile(step, backend="eager")


@pytest.mark.filterwarnings("ignore:Profiler record function")  # dynamo, of steps of optimizers
def test_compiled_steps_of_other_models_are_torchs() -> None:
    parallelize(ParallelPlan(), nn.Linear(2, 2))
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.25)
    step = compiled_step(optimizer)
    for _ in range(3):
        weight.grad = torch.ones(2)
        step()
    assert weight.tolist() == [0.25, 0.25]


def test_a_compiled_step_on_replaced_parameters_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.25)
    parallelize(ParallelPlan(), model)
    with pytest.raises(Exception, match="before, which does not train any more"):
        compiled_step(optimizer)()
