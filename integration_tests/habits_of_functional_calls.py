"""Modules that forward calls with other parameters, or themselves, each for every plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .programs import WIDTH, Plain, Run, rows

Values = dict[str, Tensor]


class Called(Plain):
    """Has one of its modules called with what is made of that module's parameters."""

    def __init__(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.change = name, change

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self._call("embed", batch["x"])
        for index in range(len(self.blocks)):
            x = self._call(f"blocks.{index}", x)
        return self._call("head", x)

    def _call(self, name: str, x: Tensor) -> Tensor:
        module = self.get_submodule(name)
        if name != self.name:
            return module(x)
        values = {name: self.change(value) for name, value in module.named_parameters()}
        return functional_call(module, values, (x,))


def block_as_it_is(run: Run) -> None:
    run.train(Called("blocks.1", lambda value: value))


def block_of_less(run: Run) -> None:
    run.train(Called("blocks.1", lambda value: 0.5 * value))


def head_of_more(run: Run) -> None:
    run.train(Called("head", lambda value: 2 * value))


class Hyper(Plain):
    """Makes the weight of a block by another module."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, 2 * WIDTH * WIDTH)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for index, block in enumerate(self.blocks):
            made = {"up.weight": self.maker(self.code).view(2 * WIDTH, WIDTH)}
            x = functional_call(block, made, (x,)) if index == 2 else block(x)
        return self.head(x)


def made_by_another(run: Run) -> None:
    run.train(Hyper())


class OfItself(Plain):
    """Calls itself once more in its forward, or with what ``change`` makes of its parameters."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, batch: Mapping[str, Tensor], *, inner: bool = False) -> Tensor:
        if inner:
            return F.mse_loss(self.logits(batch), batch["y"])
        if self.change is None:
            return self(batch, inner=True)
        values = {name: self.change(value) for name, value in self.named_parameters()}
        return functional_call(self, values, (batch,), {"inner": True})


def itself(run: Run) -> None:
    run.train(OfItself())


def itself_as_it_is(run: Run) -> None:
    run.train(OfItself(lambda value: value))


def itself_of_less(run: Run) -> None:
    run.train(OfItself(lambda value: 0.9 * value))


class Assigning(nn.Module):
    """A codebook whose forward makes new parameters of running sums."""

    def __init__(self, num_codes: int = 6) -> None:
        super().__init__()
        self.codes: Any = nn.Embedding(num_codes, WIDTH)
        self.register_buffer("counts", torch.ones(num_codes))
        self.sums = nn.Parameter(torch.randn(num_codes, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x, self.codes.weight).argmin(1)
        found = F.one_hot(chosen, len(self.sums)).to(x.dtype)
        self.counts = 0.9 * self.counts + 0.1 * found.sum(0)
        self.sums = nn.Parameter(0.9 * self.sums + 0.1 * (found.t() @ x))
        self.codes.weight = nn.Parameter(self.sums / self.counts[:, None])
        return x + (self.codes(chosen) - x).detach()


class WithAssigning(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = Assigning()

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().logits({"x": self.codebook(batch["x"])})


def assigned_in_forward(run: Run) -> None:
    run.train(WithAssigning())


def with_other_values(run: Run) -> None:
    """Calls the whole model with other parameters, from outside."""
    model, _ = run.start(Plain())
    values = {name: 0.9 * value for name, value in model.named_parameters()}
    functional_call(model, values, (run.part(rows(1)[0]),)).backward()
