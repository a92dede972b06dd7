"""Pointwise operators that a pending sum can go through where their numbers allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._torch_private import OpOverload

from .pointwise import pointwise

aten = torch.ops.aten


def _add_number(call: OpCall) -> Signature:
    """Add a number to a pending sum: the first rank alone does it."""
    made = call.layouts[0]
    if not made.is_partial or made.dtype == torch.bool:
        return pointwise(call)
    letters = tuple(range(len(made.shape)))

    def function(local: RankView) -> Function:
        pending = [
            axis for axis, p in enumerate(local.inputs[0].placements) if isinstance(p, Partial)
        ]
        if not any(local.coordinate[axis] for axis in pending):
            return call.func
        return _unchanged

    return Signature(
        (letters,), (letters,), linear=(frozenset({0}),), function=function,
        partial_kinds=frozenset({"sum"}),
    )  # fmt: skip


def _unchanged(values: Tensor, *_: Any, **__: Any) -> Tensor:
    return values


def _fill(call: OpCall) -> Signature:
    """Fill with zeros what is pending: every rank does."""
    if call.named("value") != 0 or call.layouts[0].dtype == torch.bool:
        return pointwise(call)
    found = pointwise(call)
    return Signature(found.inputs, found.outputs, linear=(frozenset({0}),))


RULES: dict[OpOverload, Any] = {
    aten.add_.Scalar: _add_number,
    aten.masked_fill.Scalar: _fill,
}
