"""Gradients of the distributed parameters, as autograd gives them, and those that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel._parameters.sharded_parameter import ShardedParameter


def hand_over(
    used: Mapping[ShardedParameter, int],
    reduced: Mapping[ShardedParameter, Tensor],
    scale: Tensor | None,
    *,
    with_hooks: bool,
) -> None:
    """Add reduced gradients to the ``.grad`` of parameters, as autograd does.

    Args:
        used: Of every parameter, whether some rank has a gradient of it.
        reduced: The gradients of those of which this rank has a shard.
        scale: What they are multiplied with, None being 1.
        with_hooks: Whether hooks of the parameters are called.
    """
    for param, is_used in used.items():
        _settle(param)
        if is_used:
            grad = reduced.get(param)
            grad = torch.zeros_like(param.local) if grad is None else grad
            accumulate(param, grad, scale, with_hooks=with_hooks)


def _settle(param: ShardedParameter) -> None:
    """Cut a gradient that autograd gave the sharded parameter itself as the parameter is cut."""
    sharded: Any = param.sharded
    grad: Any = sharded.grad
    if grad is None or not isinstance(grad, DTensor) or grad._spec is sharded._spec:
        return
    if tuple(grad.placements) != tuple(sharded.placements):
        sharded.grad = grad.redistribute(placements=sharded.placements)


def accumulate(
    param: ShardedParameter, grad: Tensor, scale: Tensor | None, *, with_hooks: bool = True
) -> None:
    """Add a reduced gradient to a parameter's ``.grad``, as autograd does, hooks included."""
    if scale is not None:
        grad = grad * scale.to(grad.device, grad.dtype)
    sharded: Any = param.sharded
    if grad.stride() != param.local.stride():
        grad = torch.empty_like(param.local, dtype=grad.dtype).copy_(grad)
    total: Any = sharded.with_local(grad)
    before, after = sharded._backward_hooks, sharded._post_accumulate_grad_hooks
    for hook in (before or {}).values() if with_hooks else ():
        changed = hook(total)
        total = total if changed is None else changed
    if sharded.grad is None:
        sharded.grad = total
    else:
        sharded.grad.add_(total)
    for hook in (after or {}).values() if with_hooks else ():
        hook(sharded)


def refuse_stray_gradients(params: Iterable[ShardedParameter]) -> None:
    """Raise if a backward pass reached parameters other than through an output of a call."""
    for param in params:
        if param.unsharded is not None and param.unsharded.grad is not None:
            param.unsharded.grad = None
            raise ValueError(
                f"{param.fqns[0]!r} got a gradient from a backward pass that did not start at "
                "what a call of the model returned, nor at a gradient of what it was given, but "
                "at what a hook has kept for example; it was not summed over ranks. Have forward "
                "return it"
            )


def refuse_graphs(param: ShardedParameter, grad: Tensor) -> None:
    """Raise if the gradient of a parameter can itself be differentiated."""
    if grad.requires_grad:
        raise ValueError(
            f"the gradient of {param.fqns[0]!r} has a graph, as backward(create_graph=True) makes "
            "it, which ends where gradients are summed over ranks. Differentiate with "
            "torch.autograd.grad(..., create_graph=True) and add what you make of it to the loss, "
            "(loss + penalty).backward()"
        )
