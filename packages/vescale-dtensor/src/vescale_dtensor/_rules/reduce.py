"""Reductions that every rank does on its part, and that pending placements complete.

A mean is a pending sum of parts that were divided by the global count. In half precision every
rank's part is added up in float32 and rounded; parts are added up in float32 in rank order, and
rounded again. So such a sum has two roundings where one device has one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import HALF, dims_of_call, is_cut, unless_empty

aten = torch.ops.aten

Rule = Callable[[OpCall], Signature]
# Makes a rank's own call from the global one, where a dim that is reduced is cut.
Part = Callable[[OpCall, RankView], Function]


def reduction(kind: str, *, part: Part | None = None, commutes: str = "") -> Rule:
    """Return the rule of a reduction over dims that ranks can do in parts.

    Args:
        kind: The reduction that completes the parts of ranks.
        part: Makes a rank's own call; the operator itself if not given.
        commutes: The pending reduction of its argument that the operator commutes with.
    """

    def rule(call: OpCall) -> Signature:
        letters, kept, reduced = reduced_letters(call)

        def function(local: RankView) -> Function:
            if part is None or not is_cut(local.inputs[0], reduced):
                return call.func
            return part(call, local)

        return Signature(
            (letters,),
            (kept,),
            reduce=dict.fromkeys(reduced, kind),
            linear=(frozenset({0}),) if commutes and _keeps_values(call) else (),
            partial_kinds=frozenset({"sum", "avg"} if commutes == "sum" else {commutes}),
            function=function if part else None,
        )

    return rule


def reduced_letters(call: OpCall) -> tuple[Dims, Dims, frozenset[int]]:
    """Return the letters of the argument, of the result, and those that are reduced."""
    ndim = len(call.layouts[0].shape)
    letters = tuple(range(ndim))
    reduced = dims_of_call(call, ndim) if ndim else frozenset[int]()
    if call.func in _EMPTY_MEANS_NONE and call.named("dim") == []:
        reduced = frozenset[int]()
    keepdim = call.named("keepdim", False)
    kept = tuple(None if d in reduced else d for d in letters if keepdim or d not in reduced)
    return letters, kept, reduced


def over_whole_dims(call: OpCall) -> Signature:
    """Return the signature of a reduction that no rank can do on a part of its dims."""
    letters, kept, reduced = reduced_letters(call)
    whole = tuple(None if d in reduced else d for d in letters)
    return Signature((whole,), (kept,) * len(call.outputs), function=unless_empty(call))


def whole_reduction(call: OpCall) -> Signature | None:
    """Return the signature of a reduction whose dims are whole, None if one is cut."""
    reduced = reduced_letters(call)[2]
    return None if is_cut(call.layouts[0], reduced) else over_whole_dims(call)


def _keeps_values(call: OpCall) -> bool:
    """Whether the result has the dtype of the argument: else pending parts are not its own."""
    before, after = call.layouts[0].dtype, call.outputs[0].dtype
    return before == after and before != torch.bool


# With no dims these reduce nothing; other operators reduce all then.
_EMPTY_MEANS_NONE = frozenset({aten.any.dims, aten.all.dims})


def _mean_part(call: OpCall, local: RankView) -> Function:
    made, reduced = local.inputs[0], reduced_letters(call)[2]
    count = prod(made.shape[dim] for dim in reduced)
    dtype = call.outputs[0].dtype
    wide = torch.float32 if dtype in HALF else dtype

    def part(values: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        # Dividing before the parts are added up: their sum may be out of range.
        return (values.sum(dim, keepdim, dtype=wide) / count).to(dtype)

    return part


RULES: dict[OpOverload, Any] = {
    aten.sum.default: reduction("sum", commutes="sum"),
    aten.sum.dim_IntList: reduction("sum", commutes="sum"),
    aten.mean.default: reduction("sum", part=_mean_part, commutes="sum"),
    aten.mean.dim: reduction("sum", part=_mean_part, commutes="sum"),
    aten.nansum.default: reduction("sum"),
    aten.count_nonzero.default: reduction("sum"),
    aten.count_nonzero.dim_IntList: reduction("sum"),
    aten.prod.default: reduction("product", commutes="product"),
    aten.prod.dim_int: reduction("product", commutes="product"),
    aten.any.default: reduction("max"),
    aten.any.dim: reduction("max"),
    aten.any.dims: reduction("max"),
    aten.all.default: reduction("min"),
    aten.all.dim: reduction("min"),
    aten.all.dims: reduction("min"),
}
