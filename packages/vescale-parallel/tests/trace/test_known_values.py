"""What is known of fake tensors: what comes of constants and masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._trace.fake_run import FakeRun
from vescale_parallel._trace.fake_tensors import ObservationError

OUTSIDE = torch.zeros(3)


class Asks(nn.Module):
    """Asks for a number that a function makes of the batch."""

    def __init__(self, ask: Callable[[Asks, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.table = nn.Buffer(torch.full((3, 3), -torch.inf).triu(1))
        self.ask, self.answer = ask, None

    def forward(self, x: Tensor) -> Tensor:
        self.answer = self.ask(self, x).item()
        return x @ self.weight


def answer(ask: Callable[[Asks, Tensor], Tensor]) -> object:
    model = Asks(ask)
    run = FakeRun(model)
    run.forward((run.batch((X.clone(),)), {}))
    expected = ask(model, X.clone()).item()
    assert run.model.answer == expected
    return expected


X = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])


def written_through_a_view(_: Asks, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[1].view(2, 2)[:, 0].add_(7)
    return mask.sum()


def written_through_another(_: Asks, x: Tensor) -> Tensor:
    column = x[:, 0]
    x.mul_(2)
    return column.sum()


def refilled(model: Asks, x: Tensor) -> Tensor:
    mask = model.weight.new_zeros(2, 3)
    mask.copy_(x)
    return mask.max() + torch.full_like(model.weight, 2.0).sum()


KNOWN: dict[str, Callable[[Asks, Tensor], Tensor]] = {
    "a mask of the batch": lambda _, x: x.sum(),
    "a comparison": lambda _, x: (x == x.round()).all(),
    "a buffer": lambda model, _: model.table.triu(1).sum(),
    "constants": lambda _, x: torch.full((3, 3), -torch.inf).triu(1)[0, 1],
    "a tensor of numbers": lambda _, x: torch.tensor([1.5, 2.5]).sum(),
    "integers that become floats": lambda _, x: torch.arange(4).float().mean(),
    "indices": lambda _, x: x.argmax() + x.nonzero().sum(),
    "a view": written_through_a_view,
    "what a view was taken of": written_through_another,
    "the shape of a parameter": refilled,
    "half precision": lambda _, x: x.bfloat16().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_comes_of_constants_and_masks_is_known(name: str) -> None:
    answer(KNOWN[name])


def mixed(model: Asks, x: Tensor) -> Tensor:
    mask = torch.zeros(2, 3)
    row = mask[0]
    mask.add_(x @ model.weight)
    return row.sum()


UNKNOWN: dict[str, Callable[[Asks, Tensor], Tensor]] = {
    "a parameter": lambda model, _: model.weight.sum(),
    "what a parameter was added to, through a view": mixed,
    "a random number": lambda _, x: torch.rand(3).sum() + x.sum(),
    "dropout": lambda _, x: torch.dropout(x, 0.5, train=True).sum(),
    "unwritten memory": lambda _, x: torch.empty_like(x).sum(),
    "too much": lambda _, x: x.sum().expand(5000, 5000).exp().sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_comes_of_parameters_and_random_numbers_is_not_known(name: str) -> None:
    with pytest.raises(ObservationError, match="DataDependent"):
        answer(UNKNOWN[name])


def test_nothing_outside_of_the_run_is_written_into() -> None:
    def writes(model: Asks, x: Tensor) -> Tensor:
        OUTSIDE.view(3).add_(1)
        model.table.add_(1)
        return x.zero_().sum()

    model, x = Asks(writes), X.clone()
    run = FakeRun(model)
    run.forward((run.batch((x,)), {}))
    assert torch.equal(OUTSIDE, torch.zeros(3))
    assert torch.equal(model.table, torch.full((3, 3), -torch.inf).triu(1))
    assert torch.equal(x, X)


def test_data_of_the_batch_is_not_known() -> None:
    run = FakeRun(Asks(lambda _, x: x.sum()))
    with pytest.raises(ObservationError, match="DataDependent"):
        run.forward((run.batch((X + 0.5,)), {}))
