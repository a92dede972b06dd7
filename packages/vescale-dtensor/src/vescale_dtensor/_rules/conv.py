"""Convolutions: samples and output channels are on their own, input channels are added up."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import is_sharded, single_dim
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import wanted

aten = torch.ops.aten


def _letters(call: OpCall, values: Layout, weight: Layout) -> tuple[Dims, Dims, Dims]:
    """Return the letters of the input, the weight and the result of a convolution."""
    window = (None,) * (len(values.shape) - 2)
    groups, transposed = call.named("groups"), call.named("transposed")
    if groups == 1:
        channels = ("in", "out") if transposed else ("out", "in")
        return ("sample", "in", *window), (*channels, *window), ("sample", "out", *window)
    channels_out = weight.shape[1] * groups if transposed else weight.shape[0]
    if values.shape[1] == channels_out == groups:  # every channel on its own
        sides = ("sample", "group", *window)
        return sides, ("group", None, *window), sides
    sides = ("sample", None, *window)
    return sides, (None, None, *window), sides


def _forward(call: OpCall) -> Signature:
    values, weight, result = _letters(call, call.layouts[0], call.layouts[1])
    has_bias = len(call.layouts) > 2
    with_bias = {2} if has_bias else set[int]()
    return Signature(
        (values, weight, (result[1],)) if has_bias else (values, weight),
        (result,),
        reduce={"in": "sum"},
        linear=(frozenset({0} | with_bias), frozenset({1} | with_bias)),
        added=frozenset(with_bias),
        arguments=_own_groups if "group" in result else None,
        function=lambda local: _own_forward(call.func, local),
    )


def _own_groups(local: RankView) -> dict[str, Any]:
    # A kernel wants one group at least, whatever it is given.
    shape = local.outputs[0].local_shape(local.coordinate)
    return {"groups": max(shape[1], 1)}


def _own_forward(func: OpOverload, local: RankView) -> Function:
    if all(prod(made.local_shape(local.coordinate)) for made in local.inputs[:2]):
        return func
    shape = local.outputs[0].local_shape(local.coordinate)

    def nothing(values: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        result = values.new_zeros(shape)
        if bias is not None:
            result += bias.view(-1, *(1 for _ in shape[2:]))
        return result

    return lambda *args, groups=1, **kwargs: nothing(*args, **kwargs)


def _backward(call: OpCall) -> Signature:
    # Tensors: the gradient of the result, the input, the weight.
    values, weight, result = _letters(call, call.layouts[1], call.layouts[2])
    of_all = (values, weight, (result[1],))
    outputs = [
        dims for dims, made in zip(of_all, call.result, strict=True) if isinstance(made, Tensor)
    ]
    has_groups = "group" in result
    sizes = call.named("bias_sizes")

    def arguments(local: RankView) -> dict[str, Any]:
        shape = local.inputs[0].local_shape(local.coordinate)
        own: dict[str, Any] = {"groups": max(shape[1], 1)} if has_groups else {}
        return own | ({"bias_sizes": [shape[1]]} if sizes else {})

    return Signature(
        (result, values, weight),
        outputs,
        # Ranks with different input channels compute the same gradient of the bias.
        reduce={"sample": "sum", "in": "sum", "out": "sum"},
        linear=(frozenset({0}),),
        arguments=arguments,
        function=lambda local: _own_backward(call.func, local, has_groups=has_groups),
    )


def _own_backward(func: OpOverload, local: RankView, *, has_groups: bool) -> Function:
    in_axes = [
        axis
        for axis, placement in enumerate(local.inputs[1].placements)
        if is_sharded(placement) and single_dim(placement) == 1 and not has_groups
    ]
    has_bias_twice = any(local.coordinate[axis] for axis in in_axes)
    shapes = [made.local_shape(local.coordinate) for made in local.inputs]
    is_empty = not all(map(prod, shapes))

    def run(grad: Tensor, values: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        results: tuple[Any, ...]
        if not is_empty:
            results = func(grad, values, weight, *args, **kwargs)
        else:
            of_bias = grad.sum([dim for dim in range(grad.ndim) if dim != 1])
            # The mask is the last argument.
            found = (torch.zeros_like(values), torch.zeros_like(weight), of_bias)
            results = wanted(found, args[-1])
        if has_bias_twice and results[2] is not None:
            results = (*results[:2], torch.zeros_like(results[2]))
        return results

    return run


RULES: dict[OpOverload, Any] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
