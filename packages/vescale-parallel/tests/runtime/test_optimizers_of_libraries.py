"""Optimizers as libraries write them: estimates in groups, state of no parameter, odd classes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from vescale_parallel import ParallelPlan, declare_optimizer, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


class Base(ABC, Optimizer):
    """As pytorch_optimizer has it: its first base is no optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            self.prepare(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, group), alpha=-group["lr"])

    def prepare(self, group: dict[str, Any]) -> None:
        """Look at a group before its parameters are updated."""

    @abstractmethod
    def update(self, p: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Return the direction."""


class Signs(Base):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    def prepare(self, group: dict[str, Any]) -> None:
        group["steps"] += 1

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        assert p.grad is not None
        return p.grad.sign() / group["steps"]


class Adapts(Signs):
    """A step size that grows once sums over all parameters are large, as Prodigy's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(size=1e-6, total=0.0)

    def prepare(self, group: dict[str, Any]) -> None:
        super().prepare(group)
        grads = (p.grad for p in group["params"] if p.grad is not None)
        group["total"] += sum(float(grad.abs().sum()) for grad in grads)
        group["size"] = max(group["size"], group["total"] / 1e12)

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        return super().update(p, group) * group["size"]


class Counts(SGD):
    """As MADGRAD keeps its number of steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.state["k"] = torch.zeros(())  # pyright: ignore[reportArgumentType]: as users write it


class CountsLater(Signs):
    def prepare(self, group: dict[str, Any]) -> None:
        super().prepare(group)
        self.state["k"] = torch.ones(())  # pyright: ignore[reportArgumentType]: as users write it


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: another name
        return super().forward(x).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def plan(zero_stage: int) -> ParallelPlan:
    said = {"data_parallel.size": 2, "data_parallel.zero_stage": zero_stage}
    return with_constraints(ParallelPlan(), said)


def stepped(model: nn.Module, optimizer: Optimizer, rows: slice) -> None:
    # Ranks are threads, and another one's trial may have set the default dtype, which they share.
    x = torch.arange(16, dtype=torch.float32).view(4, 4).sin()
    for _ in range(3):
        model(x[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_classes_whose_first_base_is_no_optimizer(in_threads: InThreads, zero_stage: int) -> None:
    declare_optimizer(Signs, updates="elements")
    alone = net()
    stepped(alone, Signs(alone.parameters()), slice(0, 4))
    models = [net() for _ in range(2)]

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = parallelize(
            plan(zero_stage), models[rank], lambda model: Signs(model.parameters())
        )
        assert isinstance(optimizer, Signs)
        assert type(optimizer).__name__ == "Signs"
        stepped(model, optimizer, slice(2 * rank, 2 * rank + 2))
        assert optimizer.state_dict()["param_groups"][0]["steps"] == 3
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    for found in in_threads(2, on_rank):
        for name, expected in alone.named_parameters():
            # Means of ranks' rows are added up in another order, in float32.
            torch.testing.assert_close(found[name], expected.detach(), rtol=0, atol=1e-6)


def refused(in_threads: InThreads, cls: type[Any], zero_stage: int = 2) -> str:
    models = [net() for _ in range(2)]

    def train(rank: int) -> None:
        model, optimizer = parallelize(
            plan(zero_stage), models[rank], lambda model: cls(model.parameters())
        )
        stepped(model, optimizer, slice(0, 2))

    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (looked at by the caller)
            train(rank)
        return str(caught.value)

    first, second = in_threads(2, on_rank)
    assert first == second
    return first


@pytest.mark.parametrize("updates", ["elements", "parameters"])
def test_a_step_size_that_is_made_of_all_parameters_is_seen_before_it_changes_updates(
    in_threads: InThreads, updates: Literal["elements", "parameters"]
) -> None:
    cls = copy.copy(Adapts) if updates == "elements" else type("Adapts", (Adapts,), {})
    declare_optimizer(cls, updates=updates)
    told = refused(in_threads, cls)
    assert told.startswith(f"Adapts is declared to update {updates}, but on a small example its")
    assert "its option 'total' " in told
    assert "make it after parallelize, of model.parameters()" in told


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("cls", [Counts, CountsLater])
def test_state_of_no_parameter_is_refused_by_its_key(
    in_threads: InThreads, cls: type[Optimizer], zero_stage: int
) -> None:
    declare_optimizer(cls, updates="elements")
    told = refused(in_threads, cls, zero_stage)
    assert "keeps 'k' in its state, which is that of a parameter each" in told
    assert "keep it in param_groups, or make the optimizer after parallelize" in told
