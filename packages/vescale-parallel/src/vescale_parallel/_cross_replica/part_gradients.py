"""Gradients of what ranks have a part of, see [Note: gradients of regions]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        # No view: what comes next may write to it in place, which autograd refuses for views
        # that a function like this one has made.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.factor, None


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
