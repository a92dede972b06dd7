"""Batch norm: channels are normalized over the whole batch, wherever its samples are.

With samples cut, training takes the moments of all ranks' samples, as one device would: what is
called synchronized batch norm. Everything else every rank does on its part.

A kernel writes running statistics, which its schema does not mention. So ranks are given copies
of these, and what the copies become is written to wherever the statistics are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from vescale_dtensor._comm.emulation import part_of
from vescale_dtensor._layout.layout import Layout, Placements, layout, replicated
from vescale_dtensor._layout.placements import is_sharded, on_dim, single_dim
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._tensor.dtensor import DTensor, as_dtensor, layout_of, redistributed
from vescale_dtensor._tensor.pending_sums import count_untold
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

from .decompositions import (
    along_single_dims,
    as_distributed,
    cut_dims,
    on_parts,
    settled,
    statistics_dtype,
    wanted,
    widened,
)
from .layer_norm import normalized, normalized_backward
from .variance import moments

aten = torch.ops.aten

_VECTORS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _forward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result and what backward needs; running statistics are written."""
    call = OpCall(func, args, kwargs)
    values = along_single_dims(as_distributed(call, "input"))
    training = call.named("training", False)
    if training and cut_dims(layout_of(values)) - {1}:
        results, statistics = _synchronized(call, values)
    else:
        results, statistics = _on_own_samples(call, values, training=training)
    for name, statistic in zip(("running_mean", "running_var"), statistics, strict=True):
        _write(call.named(name), statistic)
    return results


def _synchronized(call: OpCall, given: DTensor) -> tuple[tuple[Any, ...], list[Any]]:
    """Normalize with the moments of all samples, some of which other ranks have."""
    values = widened(given)
    dims = _samples(values.ndim)
    mean, variance = moments(values, dims)
    given_factors = (as_distributed(call, name) for name in ("weight", "bias"))
    factors = (None if each is None else _spread(each, values.ndim) for each in given_factors)
    result, rstd = normalized(values, mean, variance + call.named("eps"), *factors)
    count = values.numel() // max(values.shape[1], 1)
    unbiased = variance * (count / (count - 1) if count > 1 else nan)
    statistics: list[Any] = []
    for name, new in (("running_mean", mean), ("running_var", unbiased)):
        old, momentum = call.named(name), call.named("momentum")
        if old is not None:
            old = old * (1 - momentum) + new.reshape(-1) * momentum
        statistics.append(old)
    saved = [each.reshape(-1).to(statistics_dtype(call, 1)) for each in (mean, rstd)]
    return (_as_by_kernel(result.to(given.dtype), given), *saved), statistics


def _as_by_kernel(result: Any, given: DTensor) -> Any:
    """Return a result in the order in memory that the kernel gives it, which dropout draws in.

    That is ``channels_last`` behind such an input, and that of its dims behind any other.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.ndim)
    if given.is_contiguous() or last is None or not given.is_contiguous(memory_format=last):
        last = torch.contiguous_format
    return result.contiguous(memory_format=last)


def _on_own_samples(
    call: OpCall, values: DTensor, *, training: bool
) -> tuple[tuple[Any, ...], list[Any]]:
    """Normalize samples with statistics that need no other rank's samples."""
    made = layout_of(values)
    names, vectors = _vectors(call, made)
    settings = training, call.named("momentum"), call.named("eps")
    written = [name for name in ("running_mean", "running_var") if name in names]

    def normalize(coordinate: tuple[int, ...], local: Tensor, *vectors: Tensor) -> Any:
        own = dict(zip(names, vectors, strict=True))
        own |= {name: own[name].clone() for name in written}
        if local.numel():
            result = aten.native_batch_norm.default(
                local, own.get("weight"), own.get("bias"),
                own.get("running_mean"), own.get("running_var"), *settings,
            )  # fmt: skip
        else:
            saved = local.new_empty(saved_layout.local_shape(coordinate), dtype=saved_dtype)
            result = (local.clone(), saved, saved.clone())
        return (*result, *(own[name] for name in written))

    placements = _per_channel(made)
    saved_dtype = statistics_dtype(call, 1)
    saved_layout = (
        layout(made.mesh, placements, (made.shape[1],), None, saved_dtype)
        if training
        else layout(made.mesh, replicated(made.mesh), (0,), None, saved_dtype)
    )
    statistics = [layout_of(vectors[names.index(name)]) for name in written]
    outputs = [made, saved_layout, saved_layout, *statistics]
    results = on_parts(normalize, [values, *vectors], outputs)
    return tuple(results[:3]), results[3:] or [None, None]


def _backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of input, weight and bias that are asked for."""
    call = OpCall(func, args, kwargs)
    values = along_single_dims(as_distributed(call, "input"))
    mask = call.named("output_mask")
    if call.named("train") and cut_dims(layout_of(values)) - {1}:
        weight, mean, rstd = (
            as_distributed(call, name) for name in ("weight", "save_mean", "save_invstd")
        )
        ndim, wide = values.ndim, widened(values)
        dims = _samples(ndim)
        rstd = _spread(rstd, ndim)
        factor = None if weight is None else _spread(weight, ndim)
        normalized = (wide - _spread(mean, ndim)) * rstd
        grad = widened(as_distributed(call, "grad_out"))
        of_input, *rest = normalized_backward(grad, normalized, rstd, factor, dims, dims)
        dtype = values.dtype if weight is None else weight.dtype
        of_input = _as_by_kernel(of_input.to(values.dtype), values)
        results = (of_input, *(each.to(dtype) for each in rest))
        return wanted(results, mask)
    found = iter(_backward_on_own_samples(call, values, mask))
    return tuple(next(found) if wanted else None for wanted in mask)


def _backward_on_own_samples(call: OpCall, values: DTensor, mask: Sequence[bool]) -> list[DTensor]:
    """Return what ``mask`` asks for: CUDA's kernel has no gradient of a weight that is missing."""
    made = layout_of(values)
    given = as_distributed(call, "grad_out")
    grad = redistributed(given, made.placements)
    names, vectors = _vectors(call, made)
    pending: Placements = tuple(
        Partial() if is_sharded(before) and not is_sharded(after) else after
        for before, after in zip(made.placements, _per_channel(made), strict=True)
    )
    weight = call.named("weight")
    dtype = made.dtype if weight is None else weight.dtype
    per_channel = layout(made.mesh, pending, (made.shape[1],), None, dtype)
    outputs = [*compress((made, per_channel, per_channel), mask)]
    settings = call.named("train"), call.named("eps"), mask

    def differentiate(
        coordinate: tuple[int, ...], grad: Tensor, local: Tensor, *vectors: Tensor
    ) -> Any:
        if not local.numel():
            return tuple(
                local.new_zeros(each.local_shape(coordinate), dtype=each.dtype) for each in outputs
            )
        own = dict(zip(names, vectors, strict=True))
        rest = (own.get(name) for name in _VECTORS if name != "bias")
        found = aten.native_batch_norm_backward.default(grad, local, *rest, *settings)
        return tuple(compress(found, mask))

    return list(on_parts(differentiate, [grad, values, *vectors], outputs))


def _per_channel(made: Layout) -> Placements:
    """Return the placements of one value per channel, beside the batch."""
    return tuple(
        on_dim(p, 0) if is_sharded(p) and single_dim(p) == 1 else Replicate()
        for p in made.placements
    )


def _vectors(call: OpCall, made: Layout) -> tuple[list[str], list[DTensor]]:
    """Return the names of the arguments that have one value per channel, and these."""
    names = [name for name in _VECTORS if call.named(name) is not None]
    found = [as_distributed(call, name) for name in names]
    shape = (made.shape[1],)
    return names, [
        # Nothing was saved for the backward of an evaluation.
        redistributed(
            each, _per_channel(made) if tuple(each.shape) == shape else replicated(made.mesh)
        )
        for each in found
        if each is not None
    ]


def _write(statistic: Tensor | None, value: Any) -> None:
    if statistic is None:
        return
    if isinstance(statistic, DISTRIBUTED):
        aten.copy_.default(statistic, value)
        count_untold(as_dtensor(statistic))
    else:
        whole = redistributed(settled(value), replicated(layout_of(value).mesh))._local_tensor
        statistic.copy_(part_of(0, whole))


def _samples(ndim: int) -> list[int]:
    return [dim for dim in range(ndim) if dim != 1]


def _spread(per_channel: Any, ndim: int) -> Any:
    """Return one value per channel, with dims of size 1 for the others of a batch."""
    return per_channel.reshape(1, -1, *(1 for _ in range(ndim - 2)))


def _cudnn(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    names = ("input", "weight", "bias", "running_mean", "running_var", "training",
             "exponential_average_factor", "epsilon")  # fmt: skip
    results = aten.native_batch_norm.default(*(call.named(name) for name in names))
    # One byte that nobody reads: operators on empty tensors are not decomposed.
    made = layout(call.mesh, replicated(call.mesh), (1,), None, torch.uint8)
    device = call.tensors[0].device
    reserved = on_parts(lambda _: (torch.empty(1, dtype=torch.uint8, device=device),), [], [made])
    return (*results, *reserved)


def _cudnn_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    names = ("grad_output", "input", "weight", "running_mean", "running_var", "save_mean",
             "save_var")  # fmt: skip
    given = (call.named(name) for name in names)
    eps, mask = call.named("epsilon"), [True, True, True]
    return aten.native_batch_norm_backward.default(*given, True, eps, mask)


DECOMPOSED: dict[OpOverload, Any] = {
    aten.cudnn_batch_norm.default: _cudnn,
    aten.cudnn_batch_norm_backward.default: _cudnn_backward,
}
# Their schemas do not say that they write running statistics.
WRITES_UNTOLD = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default})
HANDLERS: dict[OpOverload, Any] = {
    **dict.fromkeys(
        (
            aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_no_training.default,
        ),
        _forward,
    ),
    aten.native_batch_norm_backward.default: _backward,
}  # fmt: skip
