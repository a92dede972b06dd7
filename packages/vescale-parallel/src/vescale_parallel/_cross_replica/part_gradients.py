"""Gradients of what ranks have a part of, see [Note: gradients of regions]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number.

    Where that is differentiated in turn, it is a tensor that crosses the same border on the way
    back, with another value on each side: see [Note: gradients of regions]. Of both conventions
    there the factor makes one, so gradients of gradients are the same, and have its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        # No view: what comes next may write to it in place, which autograd refuses for views
        # that a function like this one has made.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad.requires_grad and torch.is_grad_enabled():
            return _ScaledWithGraph.apply(grad, ctx.factor), None  # pyright: ignore[reportReturnType]
        return grad * ctx.factor, None


class _ScaledWithGraph(torch.autograd.Function):
    """A gradient multiplied by a number, whose own gradient is not."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        return grad * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ScaledGradient.apply(grad, ctx.factor), None  # pyright: ignore[reportReturnType]


def is_of_a_part(x: Tensor) -> bool:
    """Whether a plain tensor was made of what a region gave a module as this rank's part."""
    seen, waiting = set[Any](), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == f"{ScaledGradient.__name__}Backward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
