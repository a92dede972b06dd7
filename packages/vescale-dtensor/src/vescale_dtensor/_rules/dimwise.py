"""Operators along some dims that do the same at every index of the other dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.placements import is_sharded, single_dim
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import cut_dims, positions, unless_empty

aten = torch.ops.aten


def along(call: OpCall, dims: Iterable[int]) -> Signature:
    """Return the signature of an operator whose tensors all have the same number of dims."""
    made = call.layouts[0]
    ndim = len(made.shape)
    whole = {dim % max(ndim, 1) for dim in dims}
    letters: Dims = tuple(None if dim in whole else dim for dim in range(ndim))
    linear = (frozenset({0}),) if call.func in _LINEAR and has_fractions(call) else ()
    return Signature(
        (letters,) * len(call.layouts),
        (letters,) * len(call.outputs),
        function=unless_empty(call),
        linear=linear,
    )


def has_fractions(call: OpCall) -> bool:
    """Whether an operator takes and gives numbers of one floating-point or complex dtype."""
    dtypes = {call.layouts[0].dtype, *(tensor.dtype for tensor in call.outputs)}
    return len(dtypes) == 1 and all(d.is_floating_point or d.is_complex for d in dtypes)


def along_named(name: str) -> Callable[[OpCall], Signature]:
    """Return the rule of operators along the dims that an argument names."""

    def rule(call: OpCall) -> Signature:
        given = call.named(name)
        return along(call, (given,) if isinstance(given, int) else given)

    return rule


def _roll(call: OpCall) -> Signature:
    dims = call.named("dims")
    return along(call, dims or range(len(call.layouts[0].shape)))


def _norms_of_others(call: OpCall) -> Signature:
    """Return the signature of norms over all dims but one."""
    kept = call.named("dim") % len(call.layouts[0].shape)
    return along(call, (d for d in range(len(call.layouts[0].shape)) if d != kept))


def _triangle(call: OpCall) -> Signature:
    ndim = len(call.layouts[0].shape)
    letters = tuple(range(ndim))

    def function(local: RankView) -> Function:
        made = local.inputs[0]
        cut = {single_dim(p) for p in made.placements if is_sharded(p)}
        if not cut & {ndim - 2, ndim - 1}:
            return call.func
        # What is kept with a plan must not keep the tensors of the call it was made for.
        writes, coordinate = bool(call.written), local.coordinate
        lower = call.func in (aten.tril.default, aten.tril_.default)

        def part(values: Tensor, diagonal: int = 0) -> Tensor:
            rows = positions(made, coordinate, ndim - 2, values.device)
            columns = positions(made, coordinate, ndim - 1, values.device)
            offsets = columns - rows.unsqueeze(-1)
            dropped = offsets > diagonal if lower else offsets < diagonal
            if writes:
                return values.masked_fill_(dropped, 0)
            return values.masked_fill(dropped, 0)

        return part

    return Signature((letters,), (letters,), linear=(frozenset({0}),), function=function)


def _cross(call: OpCall) -> Signature | None:
    if call.layouts[0].shape != call.layouts[1].shape:
        return None
    return along(call, (call.named("dim"),))


def _searched(call: OpCall) -> Signature:
    """Return the signature of looking up values among sorted ones of the same row."""
    index = call.tensor_index("sorted_sequence")
    if index is None:
        index = call.tensor_index("boundaries")
    assert index is not None
    letters = tuple(range(call.outputs[0].ndim))
    rows: Dims = () if len(call.layouts[index].shape) == 1 else letters[:-1]
    values = call.tensor_index("self")
    inputs = [letters if i == values else (*rows, None) for i in range(len(call.layouts))]
    return Signature(inputs, (letters,))


def _trace(call: OpCall) -> Signature:
    def function(local: RankView) -> Function:
        made, coordinate = local.inputs[0], local.coordinate
        if not cut_dims(made):
            return call.func

        def part(values: Tensor) -> Tensor:
            rows = positions(made, coordinate, 0, values.device)
            columns = positions(made, coordinate, 1, values.device)
            return values.masked_fill(rows.unsqueeze(1) != columns, 0).sum()

        return part

    letters = {"row": "sum", "column": "sum"}
    linear = (frozenset({0}),) if has_fractions(call) else ()
    return Signature((("row", "column"),), ((),), reduce=letters, linear=linear, function=function)


# A pending sum of arguments may stay pending.
_LINEAR = frozenset({
    aten.cumsum.default, aten.flip.default, aten.roll.default,
    aten._fft_c2c.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
})  # fmt: skip

RULES: dict[OpOverload, Any] = {
    **dict.fromkeys(
        (
            aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default,
            aten.logcumsumexp.default, aten.glu.default, aten.glu_backward.default,
            aten.sort.default, aten.sort.stable, aten.topk.default,
        ),
        along_named("dim"),
    ),
    aten.flip.default: along_named("dims"),
    aten.linalg_cross.default: _cross,
    aten._weight_norm_interface.default: _norms_of_others,
    aten._weight_norm_interface_backward.default: _norms_of_others,
    aten.searchsorted.Tensor: _searched,
    aten.bucketize.Tensor: _searched,
    aten.trace.default: _trace,
    aten.roll.default: _roll,
    aten.renorm.default: _norms_of_others,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten._fft_c2c.default: along_named("dim"),
    aten._fft_r2c.default: along_named("dim"),
    aten._fft_c2r.default: along_named("dim"),
}  # fmt: skip
