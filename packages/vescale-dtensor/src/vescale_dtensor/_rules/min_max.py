"""Largest and smallest elements, and where they are.

Where the dim is cut, ranks agree on the value first and then on the first place that has it:
two reductions of the size of the result, however long the dim is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from vescale_dtensor._layout.layout import layout
from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._sharding.local_plan import Plan
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._tensor.dtensor import DTensor, layout_of
from vescale_dtensor._torch_private import OpOverload

from .decompositions import (
    along_single_dims,
    as_distributed,
    dims_of_call,
    on_parts,
    positions,
    settled,
)
from .reduce import over_whole_dims, reduction, whole_reduction

aten = torch.ops.aten


def identity(kind: str, dtype: torch.dtype) -> float | int | bool:
    """Return the largest value of nothing (``kind`` "max"), or the smallest ("min")."""
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if kind == "max" else limits.max


def _extreme_part(kind: str) -> Callable[[OpCall, RankView], Function]:
    def part(call: OpCall, local: RankView) -> Function:
        # Kernels refuse the maximum of nothing.
        if prod(local.inputs[0].local_shape(local.coordinate)):
            return call.func
        made = local.outputs[0]
        shape, value = made.local_shape(local.coordinate), identity(kind, made.dtype)
        return lambda values, *_, **__: values.new_full(shape, value)

    return part


def _rule(kind: str) -> Callable[[OpCall], Signature]:
    return reduction(kind, part=_extreme_part(kind), commutes=kind)


def _decomposed_aminmax(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    values = as_distributed(call, "self")
    dims, keepdim = sorted(dims_of_call(call, values.ndim)), call.named("keepdim")
    return aten.amin.default(values, dims, keepdim), aten.amax.default(values, dims, keepdim)


def _extreme(kind: str, results: slice | int) -> Plan:
    """Return what finds the value and the index of an extreme, and returns ``results`` of it."""
    return lambda func, args, kwargs: _value_and_index(OpCall(func, args, kwargs), kind)[results]


def _value_and_index(call: OpCall, kind: str) -> tuple[Any, Any]:
    values = along_single_dims(as_distributed(call, "self"))
    dims = sorted(dims_of_call(call, values.ndim))
    find = aten.amax.default if kind == "max" else aten.amin.default
    extreme = settled(find(values, dims, True))
    index = settled(_first_place(values, extreme, dims))
    if not call.named("keepdim"):
        shape = tuple(call.outputs[0].shape)
        extreme, index = aten.squeeze.dims(extreme, dims), aten.squeeze.dims(index, dims)
        assert tuple(index.shape) == shape
    return extreme, index


def _first_place(values: DTensor, extreme: DTensor, dims: list[int]) -> DTensor:
    """Return the first index along ``dims``, counted as one dim, of an extreme element."""
    made = layout_of(values)
    nowhere = prod(made.shape[dim] for dim in dims)
    placements = tuple(
        Partial("min") if is_sharded(before) and not is_sharded(after) else after
        for before, after in zip(made.placements, layout_of(extreme).placements, strict=True)
    )
    result = layout(made.mesh, placements, extreme.shape, None, torch.int64)

    def find(coordinate: tuple[int, ...], local: Tensor, wanted: Tensor) -> tuple[Tensor]:
        if not local.numel():
            shape = result.local_shape(coordinate)
            return (local.new_full(shape, nowhere, dtype=torch.int64),)
        places = local.new_zeros((1,) * local.ndim, dtype=torch.int64)
        for dim in dims:
            held = positions(made, coordinate, dim, local.device)
            along = held.view([-1 if d == dim else 1 for d in range(local.ndim)])
            places = places * made.shape[dim] + along
        found = local == wanted
        if local.dtype.is_floating_point:
            found |= local.isnan() & wanted.isnan()
        return (torch.where(found, places, nowhere).amin(dims, keepdim=True),)

    return on_parts(find, [values, extreme], [result])[0]


RULES: dict[OpOverload, Any] = {
    aten.amax.default: _rule("max"),
    aten.amin.default: _rule("min"),
    aten.max.default: _rule("max"),
    aten.min.default: _rule("min"),
    **dict.fromkeys(
        (aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default),
        over_whole_dims,
    ),
}
DECOMPOSED: dict[OpOverload, Any] = {
    aten.aminmax.default: _decomposed_aminmax,
    aten.max.dim: _extreme("max", slice(2)),
    aten.min.dim: _extreme("min", slice(2)),
    aten.argmax.default: _extreme("max", 1),
    aten.argmin.default: _extreme("min", 1),
}
RULES.update(dict.fromkeys(DECOMPOSED, whole_reduction))
