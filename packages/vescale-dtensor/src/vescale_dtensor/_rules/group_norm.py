"""Group norm: groups of channels are normalized together, every sample on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import as_distributed, cut_dims, statistics_dtype, wanted, widened
from .layer_norm import normalized, normalized_backward
from .variance import moments

aten = torch.ops.aten


def _forward(call: OpCall) -> Signature | None:
    if cut_dims(call.layouts[0]) - {0}:
        return None
    first, *rest = ((None,) * len(made.shape) for made in call.layouts)
    inputs: list[Dims] = [("sample", *first[1:]), *rest]
    outputs = [("sample", *(None for _ in tensor.shape[1:])) for tensor in call.outputs]
    return Signature(inputs, outputs, arguments=_local_samples)


def _backward(call: OpCall) -> Signature | None:
    if cut_dims(call.layouts[1]) - {0}:
        return None
    weight = call.tensor_index("weight")
    inputs = [
        tuple(None for _ in made.shape)
        if index == weight
        else ("sample", *(None for _ in made.shape[1:]))
        for index, made in enumerate(call.layouts)
    ]
    outputs = [
        (None,) if place else ("sample", *(None for _ in tensor.shape[1:]))
        for place, tensor in enumerate(call.result)
        if isinstance(tensor, Tensor)
    ]
    return Signature(
        inputs, outputs, reduce={"sample": "sum"}, linear=(frozenset({0}),),
        arguments=_local_samples,
    )  # fmt: skip


def _local_samples(local: RankView) -> dict[str, Any]:
    return {"N": local.inputs[0].local_shape(local.coordinate)[0]}


def _in_groups(call: OpCall, tensor: Any) -> Any:
    """Return a tensor of samples and channels as (N, group, C / group, HxW)."""
    names = ("N", "C", "HxW", "group")
    samples, channels, area, groups = (call.named(name) for name in names)
    return tensor.reshape(samples, groups, channels // groups, area)


def _per_channel(call: OpCall, tensor: Any) -> Any:
    groups = call.named("group")
    return tensor.reshape(1, groups, call.named("C") // groups, 1)


def _decomposed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    given = as_distributed(call, "input")
    weight, bias = as_distributed(call, "weight"), as_distributed(call, "bias")
    values = widened(_in_groups(call, given))
    mean, square = moments(values, (2, 3))
    factors = (None if each is None else _per_channel(call, each) for each in (weight, bias))
    result, rstd = normalized(values, mean, square + call.named("eps"), *factors)
    flat = (call.named("N"), call.named("group"))
    kept = statistics_dtype(call, 1)
    return (
        result.reshape(given.shape).to(given.dtype),
        mean.reshape(flat).to(kept),
        rstd.reshape(flat).to(kept),
    )


def _decomposed_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    names = ("grad_out", "input", "mean", "rstd", "weight")
    grad, given, mean, rstd, weight = (as_distributed(call, name) for name in names)
    mean, rstd = (each.reshape(*each.shape, 1, 1) for each in (mean, rstd))
    grad, values = (widened(_in_groups(call, each)) for each in (grad, given))
    factor = None if weight is None else _per_channel(call, weight)
    of_input, of_weight, of_bias = normalized_backward(
        grad, (values - mean) * rstd, rstd, factor, [2, 3], [0, 3]
    )
    channels = (call.named("C"),)
    dtype = given.dtype if weight is None else weight.dtype
    results = (
        of_input.reshape(given.shape).to(given.dtype),
        None if weight is None else of_weight.reshape(channels).to(dtype),
        of_bias.reshape(channels).to(dtype),
    )
    mask = call.named("output_mask")
    return wanted(results, mask)


RULES: dict[OpOverload, Any] = {
    aten.native_group_norm.default: _forward,
    aten.native_group_norm_backward.default: _backward,
}
DECOMPOSED: dict[OpOverload, Any] = {
    aten.native_group_norm.default: _decomposed,
    aten.native_group_norm_backward.default: _decomposed_backward,
}
