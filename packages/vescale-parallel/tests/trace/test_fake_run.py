"""What listeners hear of a run on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import observe
from vescale_parallel._trace.fake_run import FakeRun, Listener, Operator
from vescale_parallel._trace.fake_tensors import ObservationError


class Events(Listener):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.heard.append(f"into {fqn!r}")

    def left(self, fqn: str, output: Any) -> None:
        self.heard.append(f"out of {fqn!r}")

    def raised(self, fqn: str) -> None:
        self.heard.append(f"error in {fqn!r}")

    def operator(self, ran: Operator) -> None:
        real = " for real" if ran.is_integer else ""
        self.heard.append(f"{ran.func._schema.name.removeprefix('aten::')}{real}")


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().view(-1, 7)


class Falls(nn.Module):
    """Takes another way if the first one does not work."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.fails, self.works, self.again = Fails(), nn.Sigmoid(), again

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ids = ids + 1
        try:
            return self.fails(x)
        except RuntimeError:
            x = self.works(x)
        if self.again:
            raise ValueError("no other way")
        return x.tanh()


X = (torch.ones(2, 4), torch.ones(3, dtype=torch.long))


def heard_of(model: nn.Module) -> list[str]:
    run, events = FakeRun(model), Events()
    run.forward((run.batch(X), {}), events)
    return events.heard


def test_events_are_heard_in_order_and_a_caller_goes_on_where_a_module_raised() -> None:
    assert heard_of(Falls()) == [
        "into ''", "add for real", "into 'fails'", "relu", "error in 'fails'",
        "into 'works'", "sigmoid", "out of 'works'", "tanh", "out of ''",
    ]  # fmt: skip


def test_an_error_names_the_module_that_raised_it_and_not_one_that_was_caught() -> None:
    with pytest.raises(ObservationError, match=r"ValueError in module '' \(Falls\).*no other"):
        heard_of(Falls(again=True))
    with pytest.raises(ObservationError, match=r"in module '0' \(Fails\) at operator aten\.view"):
        observe(nn.Sequential(Fails()), X[0])


class Swallows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails, self.linear = Fails(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.fails(x)
        return x @ self.linear.weight


def test_what_follows_a_module_that_raised_is_counted_where_it_runs() -> None:
    calls = {c.fqn: c.flops for c in observe(nn.Sequential(Swallows()), X[0]).modules}
    assert calls == {"": 64, "0": 64, "0.fails": 0}
