"""Gradients of a block's public parameters that a program asks for within a backward pass.

A function with a backward of its own (the adjoint method of neural ODEs) is given parameters in
forward. Its backward runs a block anew and asks torch.autograd.grad for gradients of them. Those
of a block that is sharded are public ones in forward outside of it, which no graph leads to: it
would be told that they were not used, and train nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import comes_to, pytree

from .sharded_parameter import ShardedParameter


def refusing_parameters(output: Any, params: Sequence[ShardedParameter]) -> Any:
    """Return what a block returned, whose backward raises if public parameters are asked for."""
    trained = [param for param in params if param.sharded.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return output
    lead: Any = _Publics.apply(trained[0].fqns[0], *(param.sharded for param in trained))
    # As in [Note: public parameters in a graph]: only a pass through all of a graph comes to it.
    anchor = torch.zeros((), requires_grad=True)
    whole: Any = anchor.view_as(anchor)

    def led(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return _Led.apply(leaf, lead, whole, whole.grad_fn)

    return pytree.tree_map(led, output)


class _Publics(torch.autograd.Function):
    """Stands for public parameters in a graph that computed with plain ones."""

    @staticmethod
    def forward(ctx: Any, fqn: str, *publics: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.fqn, ctx.num_publics = fqn, len(publics)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is not None:
            raise ValueError(
                f"a backward pass asks for gradients of {ctx.fqn!r} and others of its block, "
                "which it runs anew (the adjoint method of neural ODEs does): zero_stage 2 and 3 "
                "keep parameters of a block sharded outside of its forward. Use "
                "data_parallel.zero_stage 1, or call such a function within the block"
            )
        return (None,) * (1 + ctx.num_publics)


class _Led(torch.autograd.Function):
    """A result, in the memory of what was computed, that leads to public parameters."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, lead: Tensor, whole: Tensor, node: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.whole = node
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        asked = None if comes_to(ctx.whole) else torch.zeros(())
        return grad, asked, None, None
