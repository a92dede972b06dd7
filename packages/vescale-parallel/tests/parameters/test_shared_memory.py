"""Parameters whose memory is another tensor's, too, are refused by name; tied ones are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm, vector_to_parameters

from vescale_parallel import refuse_shared_memory


class Model(nn.Module):
    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        change(self)


def same_data(model: Any) -> None:
    model.two.weight.data = model.one.weight.data


def another_parameter(model: Any) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data)


def one_is_frozen(model: Any) -> None:
    model.two.weight = nn.Parameter(model.one.weight.data, requires_grad=False)


def a_view(model: Any) -> None:
    model.two.bias = nn.Parameter(model.one.weight.data[1])


def a_buffer(model: Any) -> None:
    model.register_buffer("shadow", model.one.weight.data)


def an_attribute(model: Any) -> None:
    model.two.transposed = model.one.weight.t()


def in_a_list(model: Any) -> None:
    model.rows = [model.one.weight.detach()[2:]]


def another_dtype(model: Any) -> None:
    model.register_buffer("bits", model.one.weight.data.view(torch.int16))


def a_diagonal(model: Any) -> None:
    model.register_buffer("diagonal", model.one.weight.data.diagonal())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (same_data, "two.weight"),
        (another_parameter, "two.weight"),
        (one_is_frozen, "two.weight"),
        (a_view, "two.bias"),
        (a_buffer, "shadow"),
        (an_attribute, "two.transposed"),
        (in_a_list, "rows"),
        (another_dtype, "bits"),
        (a_diagonal, "diagonal"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_another_tensor_in_the_memory_of_a_parameter_is_named(
    change: Callable[[Any], None], name: str
) -> None:
    model = Model(change)
    with pytest.raises(ValueError, match=f"'one.weight' is trained, and {re.escape(repr(name))}"):
        refuse_shared_memory(model)


def tied(model: Any) -> None:
    model.two.weight = model.one.weight


def listed(model: Any) -> None:
    model.trained = [model.one.weight, model.two.weight]


def frozen(model: Any) -> None:
    model.requires_grad_(False)
    model.two.weight = nn.Parameter(model.one.weight.data, requires_grad=False)


def columns(model: Any) -> None:
    both = torch.randn(4, 8)
    model.one.weight, model.two.weight = map(nn.Parameter, both.chunk(2, 1))


def rows(model: Any) -> None:
    both = torch.randn(8, 4)
    model.one.weight, model.two.weight = map(nn.Parameter, both.chunk(2))


def one_vector(model: Any) -> None:
    vector_to_parameters(torch.randn(40), model.parameters())


def normed(model: Any) -> None:
    spectral_norm(model.one)


def copied(model: Any) -> None:
    model.register_buffer("target", model.one.weight.detach().clone())


def lazy(model: Any) -> None:
    model.one = nn.LazyLinear(4)


def expanded(model: Any) -> None:
    model.register_buffer("positions", torch.arange(4).expand(3, 4))
    model.register_buffer("more", model.positions)


@pytest.mark.parametrize(
    "change",
    [tied, listed, frozen, columns, rows, one_vector, normed, copied, lazy, expanded],
    ids=lambda change: change.__name__,
)
def test_what_has_memory_of_its_own_or_is_one_parameter_is_taken(
    change: Callable[[Any], None],
) -> None:
    refuse_shared_memory(Model(change))
