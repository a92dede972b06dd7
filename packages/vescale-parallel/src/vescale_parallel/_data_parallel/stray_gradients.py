"""Gradients that no backward pass of a call of the model has summed."""

from __future__ import annotations

from collections.abc import Iterable

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
