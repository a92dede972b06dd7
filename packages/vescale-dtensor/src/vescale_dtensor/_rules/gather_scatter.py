"""gather and scatter: an index per element, along one dim.

Along every other dim the operators do the same at each index, if the tensors are equally long
there. Along the dim itself, gather looks up in parts, see [Note: masked lookup]. To scatter, a
rank gives its part one row more, which takes what is meant for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .sharded_lookup import Part, masked, when_cut

aten = torch.ops.aten

_OWN, _EACH = "own", "each"

# How parts of what is scattered are put together, for reductions that can be.
_KINDS = {
    "sum": "sum", "add": "sum", "prod": "product", "multiply": "product",
    "amax": "max", "amin": "min",
}  # fmt: skip


def _gather(call: OpCall) -> Signature | None:
    found = _letters(call)
    if found is None:
        return None
    dim, own, each = found

    def of_part(part: Part) -> Function:
        def gather(base: Tensor, dim: int, index: Tensor, **named: Any) -> Tensor:
            return masked(dim, lambda rows, places: rows.gather(dim, places), part, base, index)

        return gather

    return Signature(
        (own, each),
        (each,),
        reduce={_OWN: "sum"},
        linear=(frozenset({0}),),
        function=when_cut(call.func, dim, of_part),
    )


def scatter(reduction: Callable[[OpCall], str | None]) -> Callable[[OpCall], Signature | None]:
    """Return the rule of a scatter.

    ``reduction`` says how values meet that are scattered to one place: "" if the last one stays,
    None if ranks could not put their parts together.
    """

    def rule(call: OpCall) -> Signature | None:
        found = _letters(call)
        if found is None:
            return None
        dim, own, each = found
        how = reduction(call)
        kind = _KINDS.get(how or "")
        if kind is None:
            each = tuple(None if letter == _EACH else letter for letter in each)
        tensors: Sequence[Dims] = (own, *(each for _ in call.layouts[1:]))
        sums = how in ("", "sum", "add") and len(tensors) == 3
        numeric = call.layouts[0].dtype is not torch.bool
        return Signature(
            tensors,
            (own,),
            reduce={_EACH: kind} if kind else {},
            linear=(frozenset({0, 2}),) if sums and numeric else (),
            added=frozenset({0}) if kind else frozenset(),
            function=when_cut(call.func, dim, lambda part: _scatter_part(call, part)),
        )

    return rule


def _scatter_part(call: OpCall, part: Part) -> Function:
    def run(base: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
        size = base.shape[dim]
        positions, _ = part.positions(index, elsewhere=size)
        # Within reach of the additional row, but an error on one device.
        positions = torch.where((index < 0) | (index >= part.size), size + 1, positions)
        shape = [*base.shape]
        shape[dim] = 1
        room = torch.cat([base, base.new_zeros(shape)], dim)
        result = call.func(room, dim, positions, *rest, **named).narrow(dim, 0, size)
        return base.copy_(result) if call.written else result.contiguous()

    return run


def _letters(call: OpCall) -> tuple[int, Dims, Dims] | None:
    """Return ``dim``, the letters of ``self`` and those of the other tensors."""
    shape = tuple(call.layouts[0].shape)
    others = [tuple(made.shape) for made in call.layouts[1:]]
    if not shape or any(len(other) != len(shape) for other in others):
        return None
    dim = call.named("dim") % len(shape)
    own: list[Any] = []
    each: list[Any] = []
    for d, size in enumerate(shape):
        equal = all(other[d] == others[0][d] for other in others)
        aligned = equal and others[0][d] == size
        own.append(_OWN if d == dim else d if aligned else None)
        each.append((_EACH if equal else None) if d == dim else d if aligned else None)
    return dim, tuple(own), tuple(each)


def _including_self(call: OpCall) -> str | None:
    return call.named("reduce") if call.named("include_self", True) else None


_set = scatter(lambda call: "")
_add = scatter(lambda call: "add")
_reduce = scatter(lambda call: call.named("reduce"))
_reduce_two = scatter(_including_self)

RULES: dict[OpOverload, Any] = {
    aten.gather.default: _gather,
    aten.scatter.src: _set,
    aten.scatter.value: _set,
    aten.scatter.reduce: _reduce,
    aten.scatter.value_reduce: _reduce,
    aten.scatter_add.default: _add,
    aten.scatter_reduce.two: _reduce_two,
}
