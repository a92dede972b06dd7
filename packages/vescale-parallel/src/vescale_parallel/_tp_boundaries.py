"""Where an activation changes hands between ranks: conversions that autograd knows.

[Note: regions] Inside a region every rank computes with its own heads or features. A whole
activation *enters*: forward nothing happens to it, backward the ranks' gradients, which are
addends, are summed. What *leaves* are addends, which are summed forward; backward every rank
gets the whole gradient. With sequence parallelism activations outside of regions are cut along
the sequence: entering gathers, and backward sums and cuts; leaving sums and cuts, and backward
gathers. These are f, g and their sequence-parallel forms of https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._tp_ranks import Ranks, own_part

Conversion = Callable[[Tensor], Tensor]


class _Convert(torch.autograd.Function):
    """One conversion forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Conversion, back: Conversion) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Through apply, so that it can be differentiated again.
        return _Convert.apply(grad, ctx.back, ctx.there), None, None  # pyright: ignore[reportReturnType]: apply is untyped


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)


class Boundary:
    """The conversions of one group of ranks.

    Attributes:
        lengths: How long the cut sequence of each stack of blocks is, as its split found it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.lengths: dict[str, int] = {}
        self._entered: tuple[weakref.ref[Tensor], tuple[object, ...], Tensor] | None = None

    def enter(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        """Bring an activation into a region.

        A tensor that several layers read enters once: gradients are summed before they are
        sent, and a cut one is gathered once.

        Args:
            x: Whole, or this rank's part.
            dim: Dim that ``x`` is cut along, None if it is whole.
            stack: The stack of blocks that the region is in; names the sequence.
        """
        key = (x._version, torch.is_grad_enabled(), dim)
        if self._entered is not None and self._entered[0]() is x and self._entered[1] == key:
            return self._entered[2]
        if dim is None:
            entered = self._convert(x, _as_it_is, self.ranks.all_reduce)
        else:
            entered = self._convert(x, self._gather(dim, stack, x), self._scatter(dim))
        self._entered = (weakref.ref(x), key, entered)
        return entered

    def leave(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        """Sum the addends that leave a region; keep this rank's part along ``dim`` if given."""
        self._entered = None
        if dim is None:
            return self._convert(x, self.ranks.all_reduce, _as_it_is)
        self.lengths[stack] = x.shape[dim]
        return self._convert(x, self._scatter(dim), self._gather(dim, stack, x))

    def split(self, x: Tensor, dim: int, stack: str) -> Tensor:
        """Keep this rank's part of a whole activation."""
        self.lengths[stack] = x.shape[dim]
        return self._convert(x, self._keep(dim), self._gather(dim, stack, x))

    def gather(self, x: Tensor, dim: int, stack: str) -> Tensor:
        """Put the parts of an activation together."""
        return self._convert(x, self._gather(dim, stack, x), self._keep(dim))

    def forget(self) -> None:
        """Let go of what entered last."""
        self._entered = None

    def _convert(self, x: Tensor, there: Conversion, back: Conversion) -> Tensor:
        return _Convert.apply(x, there, back)  # pyright: ignore[reportReturnType]: apply is untyped

    def _gather(self, dim: int, stack: str, x: Tensor) -> Conversion:
        # Noted now: backward may run when the next batch has another length.
        length = self.lengths.get(stack, x.shape[dim] * self.ranks.size)
        return lambda part: self.ranks.all_gather(part, dim, length)

    def _scatter(self, dim: int) -> Conversion:
        return lambda whole: self.ranks.reduce_scatter(whole, dim)

    def _keep(self, dim: int) -> Conversion:
        return lambda whole: own_part(whole, dim, self.ranks)
