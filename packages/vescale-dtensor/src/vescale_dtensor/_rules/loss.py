"""Losses of single elements or of rows, with none, the sum or the mean of them returned.

A mean over what ranks hold is never taken: ranks add up, and divide by the global count. So a
loss, and its gradient, does not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView, with_arguments
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import zeros_of
from .pointwise import aligned

aten = torch.ops.aten

# What the integer argument `reduction` means.
NONE, MEAN, SUM = 0, 1, 2


def _elementwise(call: OpCall) -> Signature:
    """Return the signature of a loss: its elements, their sum or their mean."""
    shape = torch.broadcast_shapes(*(made.shape for made in call.layouts))
    inputs = tuple(aligned(tuple(made.shape), tuple(shape)) for made in call.layouts)
    letters = tuple(range(len(shape)))
    if call.named("reduction") == NONE:
        return Signature(inputs, (letters,))
    return Signature(
        inputs,
        ((),),
        reduce=dict.fromkeys(letters, "sum"),
        function=_sum_over(call, prod(shape)),
    )


def _sum_over(call: OpCall, count: int) -> Callable[[RankView], Function]:
    """Return a rank's own part of a mean of ``count`` losses, or of their sum."""

    def at(local: RankView) -> Function:
        if not any(_is_cut(made) for made in local.inputs):
            return call.func
        added = with_arguments(call, {"reduction": SUM})
        if call.named("reduction") == SUM:
            return added
        return lambda *args, **kwargs: added(*args, **kwargs) / count

    return at


def _elementwise_backward(call: OpCall) -> Signature:
    """Return the signature of the gradient of :func:`_elementwise`.

    The gradient of a mean is that of a sum with a smaller cotangent.
    """
    shape = tuple(call.outputs[0].shape)
    inputs = tuple(aligned(tuple(made.shape), shape) for made in call.layouts)
    letters = tuple(range(len(shape)))
    count = prod(shape)

    def function(local: RankView) -> Function:
        if call.named("reduction") != MEAN or not any(_is_cut(made) for made in local.inputs):
            return call.func
        added = with_arguments(call, {"reduction": SUM})
        return lambda grad, *args, **kwargs: added(grad / count, *args, **kwargs)

    return Signature(inputs, (letters,), linear=(frozenset({0}),), function=function)


def _rows(call: OpCall) -> Signature:
    """Return the signature of losses of which every row of classes has one, and gradients."""
    scores = call.named("self")
    main = call.tensor_index("self") or 0
    backward = main > 0
    if backward:  # torch cannot tell its shape without data
        call.result = torch.empty(scores.shape, dtype=scores.dtype, device="meta")
    batch: Dims = ("batch",) if scores.ndim > 1 else ()
    count = scores.shape[0] if batch else 1
    weight = call.tensor_index("weight")
    inputs = tuple(
        _batched((), made.shape) if i == weight else _batched(batch, made.shape)
        for i, made in enumerate(call.layouts)
    )
    outputs = tuple(_batched(batch, tensor.shape) for tensor in call.outputs)

    def function(local: RankView) -> Function:
        if not _is_cut(local.inputs[main]):
            return call.func
        if not prod(local.inputs[main].local_shape(local.coordinate)):
            return zeros_of(call, local)
        if call.named("reduction") != MEAN:
            return call.func
        added = with_arguments(call, {"reduction": SUM})
        if backward:
            return lambda grad, *args, **kwargs: added(grad / count, *args, **kwargs)
        return lambda *args, **kwargs: _divided(added(*args, **kwargs), count)

    return Signature(
        inputs, outputs, reduce={"batch": "sum"}, function=function if batch else None
    )


def _batched(batch: Dims, shape: Sequence[int]) -> Dims:
    if not shape:
        return ()
    return (*batch, *(None for _ in shape[len(batch) :]))


def _divided(result: Any, count: int) -> Any:
    if isinstance(result, tuple):
        return (result[0] / count, *result[1:])
    return result / count


def _log_sigmoid(call: OpCall) -> Signature:
    """Return the signature of a function whose second result may be empty on a device."""

    def run(values: Tensor) -> tuple[Tensor, Tensor]:
        result, kept = aten.log_sigmoid_forward.default(values)
        return result, kept if kept.shape == result.shape else torch.zeros_like(result)

    letters = tuple(range(len(call.layouts[0].shape)))
    return Signature((letters,), (letters, letters), function=lambda _: run)


def _log_sigmoid_backward(call: OpCall) -> Signature | None:
    letters = tuple(range(len(call.layouts[0].shape)))
    if any(len(made.shape) != len(letters) for made in call.layouts):
        return None
    kept = letters if call.layouts[2].shape == call.layouts[1].shape else (None,) * len(letters)
    return Signature((letters, letters, kept), (letters,), linear=(frozenset({0}),))


def _is_cut(made: Layout) -> bool:
    return any(is_sharded(placement) for placement in made.placements)


RULES: dict[OpOverload, Any] = {
    **dict.fromkeys(
        (
            aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
            aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
            aten.soft_margin_loss.default,
        ),
        _elementwise,
    ),
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default, aten.binary_cross_entropy_backward.default,
            aten.soft_margin_loss_backward.default,
        ),
        _elementwise_backward,
    ),
    **dict.fromkeys(
        (
            aten.multi_margin_loss.default, aten.multi_margin_loss_backward.default,
            aten.multilabel_margin_loss_forward.default,
            aten.multilabel_margin_loss_backward.default,
        ),
        _rows,
    ),
}  # fmt: skip
