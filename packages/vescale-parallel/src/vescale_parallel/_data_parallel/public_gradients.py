"""Reduced gradients as those of the distributed parameters, as autograd gives them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel._parameters.sharded_parameter import ShardedParameter


def settle(param: ShardedParameter) -> None:
    """Cut a gradient that autograd gave the sharded parameter itself as the parameter is cut."""
    sharded: Any = param.sharded
    grad: Any = sharded.grad
    if isinstance(grad, DTensor) and tuple(grad.placements) != tuple(sharded.placements):
        sharded.grad = grad.redistribute(placements=sharded.placements)


def accumulate(param: ShardedParameter, grad: Tensor, scale: Tensor | None) -> None:
    """Add a reduced gradient to a parameter's ``.grad``, as autograd does, hooks included."""
    if scale is not None:
        grad = grad * scale.to(grad.dtype)
    sharded: Any = param.sharded
    total: Any = DTensor.from_local(
        grad.contiguous(), sharded.device_mesh, sharded.placements, shape=sharded.shape
    )
    for hook in (sharded._backward_hooks or {}).values():
        changed = hook(total)
        total = total if changed is None else changed
    if sharded.grad is None:
        sharded.grad = total
    else:
        sharded.grad.add_(total)
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        hook(sharded)
