"""What is noted of tensors that optimizers update beside a model, and that it ends."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD

from vescale_parallel._runtime.compared.first_passes import FirstPasses
from vescale_parallel._runtime.compared.trained_beside import TrainedBeside


class Passes:
    """Takes the place of what compares between ranks."""

    is_open, has_begun = True, False

    def __init__(self) -> None:
        self.num_noted = 0

    def note(self, *args: Any, **kwargs: Any) -> None:
        self.num_noted += 1


def test_of_models_that_are_not_trained_little_is_noted() -> None:
    passes = Passes()
    beside = TrainedBeside(cast("FirstPasses", passes))
    plain = nn.Linear(4, 1)
    optimizer = SGD(plain.parameters(), lr=0.1)

    def train(steps: int) -> int:
        before = passes.num_noted
        for _ in range(steps):
            plain(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return passes.num_noted - before

    assert train(50) == 0  # no pass would ever end it
    passes.has_begun = True
    assert train(2) == 2 * 2
    assert train(50) < 2 * 10
    assert train(50) == 0
    beside.begin_pass()
    assert train(1) == 2
    passes.is_open = False
    assert train(50) == 0
