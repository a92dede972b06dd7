"""Results of a pipeline whose backward is its own: of gradients it has, or of passes to run."""

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

_TWICE = (
    "backward was called a second time on the loss of one pipeline step, which keeps no graph; "
    "call the model again"
)


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
        for param in [*grads]:
            assert param.unsharded is not None
            param.unsharded.grad = grads.pop(param)  # or each was there until all are reduced
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


def with_graph(
    output: Any,
    run_backward: Callable[[Sequence[Tensor | None]], None],
    graph: CallGraph | None = None,
) -> Any:
    """Return an output whose tensors that require a gradient have ``run_backward`` as theirs.

    It is called once, with the gradients of these tensors in order, None for those that were not
    used. ``graph`` stands for the public parameters.
    """
    leaves, spec = pytree.tree_flatten(output)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not places:
        return output
    # As an object: a tensor that goes in and comes out would be a view, not written in place.
    held = [leaves[index].requires_grad_(False) for index in places]
    given = run_backward if graph is None else graph.handing_out(run_backward)
    found: Any = _RunBackward.apply(*_anchors(graph), lambda: held, given)
    for index, leaf in zip(places, found, strict=True):
        leaves[index] = leaf
    return pytree.tree_unflatten(leaves, spec)


def _refuse(_: Tensor) -> None:
    raise ValueError(
        "a pipeline differentiates the loss that forward returns, and no other scalar or tensor "
        "of its output; add what should be differentiated to the loss in forward"
    )


class _RunBackward(torch.autograd.Function):
    """What a pipeline's forward passes returned; its backward passes run in backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        anchor: Tensor,
        publics: Tensor,
        held: Callable[[], Sequence[Tensor]],
        run_backward: Callable[[Sequence[Tensor | None]], None],
    ) -> tuple[Tensor, ...]:
        ctx.run_backward, ctx.whole = run_backward, anchor.grad_fn
        ctx.set_materialize_grads(False)
        return tuple(held())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.run_backward is None:
            raise RuntimeError(_TWICE)
        run_backward, ctx.run_backward = ctx.run_backward, None
        with announced_failures():
            run_backward(grads)
        return None, _for_publics(ctx.whole), None, None


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
            raise RuntimeError(_TWICE)
        finish, ctx.finish = ctx.finish, None
        with announced_failures():
            finish(grad)
        return None, _for_publics(ctx.whole), None, None


def _for_publics(whole: Any) -> Tensor | None:
    """Return what a pass brings public parameters: nothing, if it is through all of a graph."""
    return torch.zeros(()) if whole is not None and not comes_to(whole) else None
