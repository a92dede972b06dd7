"""An example batch from a data set is what an ordinary loop calls the model with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.inputs import bind, example_from


class Named(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x + y


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


ROWS = [{"x": torch.ones(3), "y": torch.zeros(3)}] * 2


def test_rows_that_are_dicts_become_the_arguments_of_their_names() -> None:
    args, kwargs = bind(Named(), example_from(ROWS))
    assert args == ()
    assert {name: tuple(value.shape) for name, value in kwargs.items()} == {
        "x": (2, 3),
        "y": (2, 3),
    }


def test_a_forward_that_takes_a_batch_gets_the_dict() -> None:
    (batch,), kwargs = bind(Whole(), example_from(ROWS))
    assert kwargs == {}
    assert batch.keys() == {"x", "y"}


def test_rows_that_are_pairs_become_arguments_in_order() -> None:
    args, kwargs = bind(Named(), example_from([(torch.ones(3), torch.zeros(3))] * 2))
    assert [tuple(value.shape) for value in args] == [(2, 3), (2, 3)]
    assert kwargs == {}
