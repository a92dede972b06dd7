"""A small model under ZeRO on two ranks, and what is asked of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import CommCounter
from vescale_parallel import ParallelPlan, parallelize, with_constraints

WORLD, WIDTH = 2, 5  # a width that does not divide
ROWS = torch.arange(4.0 * WIDTH, dtype=torch.float64).view(4, WIDTH) / 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.seen: Callable[[str], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen
        if seen is None:
            return torch.tanh(self.linear(x))
        seen("forward")
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda _: seen("backward"))
        return torch.tanh(x)


class Net(nn.Module):
    """Two blocks, and a head whose weight a third use shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.last.weight = self.first.weight
        self.skips: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.skipping(x, self.skips)

    def skipping(self, x: Tensor, skipped: int | None) -> Tensor:
        """Return the loss, without one of the blocks."""
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return self.last(x).pow(2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows_of(rank: int) -> Tensor:
    return ROWS[2 * rank : 2 * rank + 2]


def parallel(rank_model: nn.Module, stage: int, **constraints: Any) -> Any:
    plan = with_constraints(
        ParallelPlan(),
        {"data_parallel.size": WORLD, "data_parallel.zero_stage": stage, **constraints},
    )
    return parallelize(plan, rank_model)


def wholes(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of all ranks, put together. Every rank must call this."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = None if grad is None else grad.full_tensor()
    return found


def assert_close(got: dict[str, Tensor | None], expected: nn.Module, times: float = 1.0) -> None:
    for name, parameter in expected.named_parameters():
        grad = got[name]
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None and parameter.grad is not None:
            # The mean of two halves is the mean of the whole up to rounding.
            assert torch.allclose(grad, times * parameter.grad, rtol=0, atol=1e-12), name


class OwnCounter(CommCounter):
    """Counts what its own thread, which is a rank, sends."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.on_reduction: Callable[[], None] = lambda: None

    def _hear(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            super()._hear(event)
            if event.kind in ("all_to_all", "all_reduce"):
                self.on_reduction()

    def kinds(self) -> Counter[str]:
        return Counter(event.kind for event in self.events)
