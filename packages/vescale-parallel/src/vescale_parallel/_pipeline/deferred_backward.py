"""A loss whose gradients a pipeline's schedule has computed: its backward hands them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import announced_failures
from vescale_parallel._loss.output import Scalar
from vescale_parallel._parameters.asked_gradients import CallGraph
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import comes_to, pytree


def with_deferred_backward(
    output: Any,
    params: Sequence[ShardedParameter],
    finish: Callable[[Tensor], None],
    device: str,
    check: Callable[[], None] = lambda: None,
    graph: CallGraph | None = None,
) -> Any:
    """Return a step's output with a tensor for each :class:`Scalar`; others refuse backward.

    The gradients of unsharded parameters are taken away, until ``backward`` of the loss puts them
    back for ``finish``, which gets the gradient of the loss.

    ``output`` is what :meth:`Pipeline.run` returned; ``finish`` reduces gradients, scaled;
    ``device`` is where the scalars shall be. ``check`` raises, before anything is handed out, if
    the gradients must not be any more. ``graph`` stands for the public parameters.
    """
    grads: dict[ShardedParameter, Tensor | None] = {}
    for param in params:
        if param.unsharded is not None:
            grads[param], param.unsharded.grad = param.unsharded.grad, None

    def hand_out(scale: Tensor) -> None:
        check()
        for param, grad in grads.items():
            assert param.unsharded is not None
            param.unsharded.grad = grad
        finish(scale)

    anchors = _anchors(graph)
    given = hand_out if graph is None else graph.handing_out(hand_out)

    def differentiable(scalar: Scalar) -> Any:
        if not scalar.requires_grad:
            return scalar.tensor(device)
        called = given if scalar.is_loss else _refuse
        return _HandOut.apply(*anchors, scalar.tensor(device), called)

    def refused(tensor: Tensor) -> Any:
        held = tensor.detach()
        return _HandOut.apply(*anchors, held, _refuse) if tensor.requires_grad else tensor

    output = pytree.tree_map_only(Tensor, refused, output)
    return pytree.tree_map_only(Scalar, differentiable, output)


def _anchors(graph: CallGraph | None) -> tuple[Tensor, Tensor]:
    """Return what a loss leads to: something with a gradient, and the public parameters."""
    if graph is None:
        return torch.zeros((), requires_grad=True), torch.zeros(())
    return graph.whole, graph.node


def refusing_backward(output: Any, graph: CallGraph | None = None) -> Any:
    """Return the output of a call without a loss, so that differentiating it says what to do."""
    anchors = _anchors(graph)

    def refusing(x: Tensor) -> Tensor:
        return _HandOut.apply(*anchors, x, _refuse_outside) if x.is_floating_point() else x  # pyright: ignore[reportReturnType]

    return pytree.tree_map_only(Tensor, refusing, output)


def _refuse_outside(_: Tensor) -> None:
    raise ValueError(
        "a pipeline differentiates the loss that forward returns, and this call returned none: "
        "its results were computed without a graph. Have forward compute the loss (give "
        "transformers' models labels), give the function that computes it to "
        "parallelize(..., loss_fn=...) and call loss = model(x, target=y), or use "
        "pipeline_parallel.size 1"
    )


def _refuse(_: Tensor) -> None:
    raise ValueError(
        "a pipeline differentiates the loss that forward returns, and no other scalar or tensor "
        "of its output; add what should be differentiated to the loss in forward"
    )


class _HandOut(torch.autograd.Function):
    """A loss whose gradients were computed by the pipeline's schedule."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, publics: Tensor, loss: Tensor, finish: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.finish, ctx.whole = finish, anchor.grad_fn
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.finish is None:
            raise RuntimeError(
                "backward was called a second time on the loss of one pipeline step, which "
                "keeps no graph; call the model again"
            )
        finish, ctx.finish = ctx.finish, None
        with announced_failures():
            finish(grad)
        asked = ctx.whole is not None and not comes_to(ctx.whole)
        return None, torch.zeros(()) if asked else None, None, None
