"""Gradients that are not summed over ranks: of other backward passes, or with graphs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from vescale_parallel._parameters.sharded_parameter import ShardedParameter


def refuse_stray_gradients(params: Iterable[ShardedParameter]) -> None:
    """Raise if a backward pass reached parameters other than through an output of a call."""
    for param in params:
        if param.unsharded is not None and param.unsharded.grad is not None:
            param.unsharded.grad = None
            raise ValueError(
                f"{param.fqns[0]!r} got a gradient from a backward pass that did not start at "
                "what a call of the model returned, as that of torch.autograd.grad(..., "
                "create_graph=True) alone; it was not summed over ranks. Add it to the loss, "
                "(loss + penalty).backward()"
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
