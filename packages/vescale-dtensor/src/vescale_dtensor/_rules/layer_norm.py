"""Layer norm and RMS norm: rows are normalized on their own.

Where the normalized dims are cut, moments are reduced over ranks, and only they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import as_distributed, is_cut, settled, statistics_dtype, widened
from .variance import moments

aten = torch.ops.aten


def _forward(call: OpCall) -> Signature | None:
    rows = _rows(call)
    if is_cut(call.layouts[0], range(rows, len(call.layouts[0].shape))):
        return None
    inputs = [_lettered(0, made.shape) for made in call.layouts]
    inputs[0] = _lettered(rows, call.layouts[0].shape)
    return Signature(inputs, [_lettered(rows, tensor.shape) for tensor in call.outputs])


def _backward(call: OpCall) -> Signature | None:
    rows = _rows(call)
    if is_cut(call.layouts[1], range(rows, len(call.layouts[1].shape))):
        return None
    with_rows = [call.tensor_index(name) for name in ("input", "mean", "rstd")]
    inputs = [
        _lettered(rows if i == 0 or i in with_rows else 0, made.shape)
        for i, made in enumerate(call.layouts)
    ]
    outputs = [
        _lettered(0 if place else rows, tensor.shape)
        for place, tensor in enumerate(call.result)
        if isinstance(tensor, Tensor)
    ]
    letters = dict.fromkeys(range(rows), "sum")
    return Signature(inputs, outputs, reduce=letters, linear=(frozenset({0}),))


def _rows(call: OpCall) -> int:
    """Return the number of dims that are not normalized."""
    return call.named("input").ndim - len(call.named("normalized_shape"))


def _lettered(rows: int, shape: Sequence[int]) -> Dims:
    return (*range(rows), *(None for _ in shape[rows:]))


def _decomposed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    values = widened(as_distributed(call, "input"))
    dims = list(range(_rows(call), values.ndim))
    eps = call.named("eps")
    if func is aten._fused_rms_norm.default:
        eps = torch.finfo(values.dtype).eps if eps is None else eps
        mean = None
        square = settled(aten.mean.dim(values * values, dims, True))
    else:
        mean, square = moments(values, dims)
    weight, bias = as_distributed(call, "weight"), None
    if mean is not None:
        bias = as_distributed(call, "bias")
    result, rstd = normalized(values, mean, square + eps, weight, bias)
    result = result.to(call.outputs[0].dtype)
    if mean is None:
        return result, rstd
    kept = statistics_dtype(call, 1)
    return result, mean.to(kept), rstd.to(kept)


def _decomposed_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    names = ("grad_out", "input", "mean", "rstd", "weight")
    grad, values, mean, rstd, weight = (as_distributed(call, name) for name in names)
    dtype = values.dtype
    grad, values = widened(grad), widened(values)
    rows = _rows(call)
    normalized, batch = list(range(rows, values.ndim)), list(range(rows))
    centered = values if mean is None else values - mean
    results = normalized_backward(
        grad, centered * rstd, rstd, weight, normalized, batch, centers=mean is not None
    )
    mask = call.named("output_mask")
    dtypes = (dtype, *(dtype if weight is None else weight.dtype for _ in mask[1:]))
    kept = (True, weight is not None, call.named("bias") is not None)
    return tuple(
        result.to(to) if wanted and there else None
        for result, wanted, there, to in zip(results, mask, kept, dtypes, strict=False)
    )


def normalized(values: Any, mean: Any, square: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Return a normalization and what it has multiplied by, all but ``square`` None if absent."""
    rstd = square.rsqrt()
    result = (values if mean is None else values - mean) * rstd
    if weight is not None:
        result = result * weight
    return (result if bias is None else result + bias), rstd


def normalized_backward(
    grad: Any,
    normalized: Any,
    rstd: Any,
    weight: Any,
    dims: list[int],
    batch: list[int],
    *,
    centers: bool = True,
) -> tuple[Any, Any, Any]:
    """Return the gradients of input, weight and bias of a normalization.

    Args:
        grad: The gradient of the result.
        normalized: The input, normalized: before weight and bias.
        rstd: What it was multiplied by for that, broadcast.
        weight: What it was multiplied by afterwards, broadcast; None for 1.
        dims: The dims over which moments were taken.
        batch: The dims that ``weight`` lacks.
        centers: Whether the mean was subtracted.
    """
    inner = grad if weight is None else grad * weight
    mean_product = settled(aten.mean.dim(inner * normalized, dims, True))
    result = inner - normalized * mean_product
    if centers:
        result = result - settled(aten.mean.dim(inner, dims, True))
    of_weight, of_bias = grad * normalized, grad
    if batch:
        of_weight = aten.sum.dim_IntList(of_weight, batch)
        of_bias = aten.sum.dim_IntList(of_bias, batch)
    return result * rstd, of_weight, of_bias


RULES: dict[OpOverload, Any] = {
    aten.native_layer_norm.default: _forward,
    aten._fused_rms_norm.default: _forward,
    aten.native_layer_norm_backward.default: _backward,
    aten._fused_rms_norm_backward.default: _backward,
}
DECOMPOSED: dict[OpOverload, Any] = {
    aten.native_layer_norm.default: _decomposed,
    aten._fused_rms_norm.default: _decomposed,
    aten.native_layer_norm_backward.default: _decomposed_backward,
    aten._fused_rms_norm_backward.default: _decomposed_backward,
}
