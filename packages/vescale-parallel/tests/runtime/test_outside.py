"""What is done to a parallelized model outside of its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._runtime.outside import refuse_parts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.activation(x).mean()


X = torch.ones(3, 2)


def watched(*, is_running: bool = False) -> Any:
    model = Model()
    refuse_parts(model, ["blocks.0", "blocks.1"], lambda: is_running)
    return model


@pytest.mark.parametrize("fqn", ["embed", "blocks.0", "blocks.1"])
def test_parts_with_parameters_that_train_are_refused_outside_of_calls(fqn: str) -> None:
    part = watched().get_submodule(fqn)
    with pytest.raises(ValueError, match=rf"'{fqn}' was called from outside of a call"):
        part(X)


def test_forward_without_a_call_is_refused_by_its_first_part() -> None:
    with pytest.raises(ValueError, match="'embed' was called from outside of a call"):
        watched().forward(X)


def test_parts_run_within_calls() -> None:
    watched(is_running=True).forward(X).backward()


def test_parts_that_train_nothing_run() -> None:
    model = watched()
    model.activation(X)
    with torch.no_grad():
        model.blocks[0](X)
    model.blocks[0].requires_grad_(False)
    model.blocks[0](X)
