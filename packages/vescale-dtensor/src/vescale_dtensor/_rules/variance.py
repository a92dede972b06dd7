"""Variances, norms and the logarithm of a sum of exponentials: functions of a few reductions.

The last step is not one that ranks can do on their parts, so what was reduced is settled first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._torch_private import OpOverload

from .decompositions import as_distributed, by_signature, dims_of_call, settled, widened
from .reduce import whole_reduction

aten = torch.ops.aten


def moments(values: Any, dims: Sequence[int]) -> tuple[Any, Any]:
    """Return mean and mean squared deviation over ``dims``, which are kept; nothing pending."""
    dims = list(dims)
    mean = settled(aten.mean.dim(values, dims, True))
    deviation = values - mean
    if values.dtype.is_complex:
        deviation = deviation.abs()
    return mean, settled(aten.mean.dim(deviation * deviation, dims, True))


def _variance(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    values = as_distributed(call, "self")
    dims = sorted(dims_of_call(call, values.ndim))
    correction = call.named("correction")
    mean, deviation = moments(widened(values), dims)
    count = math.prod(values.shape[dim] for dim in dims)
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = deviation * (count / freedom if freedom else math.inf if count else math.nan)
    if func in (aten.std.correction, aten.std_mean.correction):
        variance = variance.sqrt()
    results: tuple[Any, ...] = (variance, mean)[: len(call.outputs)]
    if not call.named("keepdim"):
        results = tuple(aten.squeeze.dims(each, dims) for each in results)
    typed = [r.to(o.dtype) for r, o in zip(results, call.outputs, strict=True)]
    return tuple(typed) if len(typed) > 1 else typed[0]


def _logsumexp(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    given = as_distributed(call, "self")
    dims = sorted(dims_of_call(call, given.ndim))
    values = widened(given.to(call.outputs[0].dtype))
    # Complex numbers have no order; exponentials are as large as their real parts say.
    ordered = aten.real.default(values) if values.dtype.is_complex else values
    largest = settled(aten.amax.default(ordered, dims, True))
    # The difference of two infinities is no number.
    shift = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    total = settled(aten.sum.dim_IntList((values - shift).exp(), dims, True))
    result = total.log() + shift
    if not call.named("keepdim"):
        result = aten.squeeze.dims(result, dims)
    return result.to(call.outputs[0].dtype)


def norm_over_dims(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the p-norm over some dims. Every rank of the tensor's mesh must call this."""
    call = OpCall(func, args, kwargs)
    signature = whole_reduction(call)
    if signature is not None:
        return by_signature(func, args, kwargs, signature)
    given = as_distributed(call, "self")
    dims = sorted(dims_of_call(call, given.ndim))
    order = call.named("ord", call.named("p"))
    dtype = call.named("dtype") or given.dtype
    sizes = widened(given.to(dtype)).abs()
    result = _norm(sizes, 2.0 if order is None else float(order), dims)
    if not call.named("keepdim"):
        result = aten.squeeze.dims(result, dims)
    return result.to(call.outputs[0].dtype)


def _norm(sizes: Tensor, order: float, dims: list[int]) -> Any:
    if math.isinf(order):
        find = aten.amax.default if order > 0 else aten.amin.default
        return settled(find(sizes, dims, True))
    if order == 0:
        return settled(aten.sum.dim_IntList((sizes != 0).to(sizes.dtype), dims, True))
    powers = sizes * sizes if order == 2 else sizes if order == 1 else sizes.pow(order)
    total = settled(aten.sum.dim_IntList(powers, dims, True))
    return total.sqrt() if order == 2 else total if order == 1 else total.pow(1 / order)


_VARIANCES = (
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
)  # fmt: skip
RULES: dict[OpOverload, Any] = {
    **dict.fromkeys(_VARIANCES, whole_reduction),
    aten.logsumexp.default: whole_reduction,
}
DECOMPOSED: dict[OpOverload, Any] = {
    **dict.fromkeys(_VARIANCES, _variance),
    aten.logsumexp.default: _logsumexp,
}
HANDLERS: dict[OpOverload, Any] = {
    aten.norm.ScalarOpt_dim: norm_over_dims,
    aten.norm.ScalarOpt_dim_dtype: norm_over_dims,
}
