"""A tensor that chunks read: one copy each, whose gradients are added in a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tree import tree_sum

Conversion = Callable[[Tensor], Tensor]


class _Copies(torch.autograd.Function):
    """The tensor itself, which nothing may differentiate, and a copy for each chunk.

    Copies share memory. The gradient of a copy is what all readers of one chunk add up to:
    several layers of a region (query, key, value) are added within a chunk, before chunks are.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, there: Conversion, back: Conversion, num_chunks: int, name: str
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.dtype, ctx.name = back, x.dtype, name
        ctx.set_materialize_grads(False)
        whole = there(x)
        return tuple(whole.view_as(whole) for _ in range(num_chunks + 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        itself, *of_chunks = grads
        if itself is not None:
            raise ValueError(
                f"numerics 'invariant': what enters {ctx.name or 'a layer'} is read by column-wise"
                " linear layers alone, whose gradients are added chunk by chunk; something else "
                "that is differentiated reads it, too. Leave numerics out of the plan"
            )
        if all(grad is None for grad in of_chunks):
            return (None,) * 5
        given = next(grad for grad in of_chunks if grad is not None)
        terms = [torch.zeros_like(given) if grad is None else grad for grad in of_chunks]
        return ctx.back(tree_sum(terms)).to(ctx.dtype), None, None, None, None


def for_chunks(
    x: Tensor, there: Conversion, back: Conversion, num_chunks: int, name: str = ""
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ``there(x)``, and a copy of it for every chunk of this rank.

    Backward, the sum of the copies' gradients goes through ``back``, in the dtype of accumulation.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        whole, *copies = _Copies.apply(x, there, back, num_chunks, name)  # pyright: ignore[reportGeneralTypeIssues]: apply is untyped
        return whole, tuple(copies)
    whole = there(x)
    return whole, (whole,) * num_chunks
