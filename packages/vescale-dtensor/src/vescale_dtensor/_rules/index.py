"""Indexing along one dim or with index tensors: index_select, index_add, x[i], x[i] = y.

Dims that are not indexed have letters; so have the dims of the index tensors, which need not have
any: an index without dims is one row. A dim that is
indexed may be cut if it is the only one: see [Note: masked lookup] for reading. For writing, a
rank takes what is written to its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .pointwise import aligned
from .sharded_lookup import Part, nothing, when_cut, with_row

aten = torch.ops.aten

_OWN, _EACH = "own", "each"


def _index_select(call: OpCall) -> Signature | None:
    if not call.layouts[0].shape:
        return None
    dim, base, rows = _along(call)
    is_one = not call.layouts[1].shape
    result: Dims = tuple(None if is_one and letter == _EACH else letter for letter in rows)

    def of_part(part: Part) -> Function:
        def select(base: Tensor, _: int, index: Tensor) -> Tensor:
            return _selected(part, base, dim, index.reshape(-1))

        return select

    return Signature(
        (base, () if is_one else (_EACH,)),
        (result,),
        reduce={_OWN: "sum"},
        linear=(frozenset({0}),),
        function=when_cut(call.func, dim, of_part),
    )


def _index_write(call: OpCall, *, added: bool, linear: bool) -> Signature | None:
    """Return the signature of what writes rows of ``source`` to rows of ``self``."""
    if not call.layouts[0].shape or not call.layouts[2].shape:
        return None
    dim, base, rows = _along(call)
    is_one = not call.layouts[1].shape
    each = _EACH if added and not is_one else None
    source = tuple(each if letter == _EACH else letter for letter in rows)

    def of_part(part: Part) -> Function:
        def write(base: Tensor, dim: int, index: Tensor, source: Tensor, *rest: Any, **named: Any):
            positions, taken = _taken(part, index.reshape(-1))
            rows = source.index_select(dim, taken.nonzero().squeeze(-1))
            return call.func(base, dim, positions[taken], rows, *rest, **named)

        return write

    return Signature(
        (base, () if is_one else (each,), source),
        (base,),
        reduce={_EACH: "sum"} if each else {},
        linear=(frozenset({0, 2}),) if linear else (),
        added=frozenset({0}) if added else frozenset(),
        function=when_cut(call.func, dim, of_part),
    )


def _index_fill(call: OpCall) -> Signature | None:
    if not call.layouts[0].shape:
        return None
    dim, base, _ = _along(call)

    def of_part(part: Part) -> Function:
        def fill(base: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
            positions, taken = _taken(part, part.wrapped(index.reshape(-1)))
            return call.func(base, dim, positions[taken], value)

        return fill

    index: Dims = (None,) * len(call.layouts[1].shape)
    values: tuple[Dims, ...] = ((),) * (len(call.layouts) - 2)
    return Signature((base, index, *values), (base,), function=when_cut(call.func, dim, of_part))


def _along(call: OpCall) -> tuple[int, Dims, Dims]:
    """Return ``dim``, the letters of ``self`` and those of what has a row per index."""
    letters = tuple(range(len(call.layouts[0].shape)))
    dim = call.named("dim") % len(letters)
    own, each = (
        tuple(name if letter == dim else letter for letter in letters) for name in (_OWN, _EACH)
    )
    return dim, own, each


def _taken(part: Part, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions, and which a rank writes to: its own, and those that are errors."""
    positions, here = part.positions(index)
    return positions, here | (index < 0) | (index >= part.size)


def _selected(part: Part, base: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return what a 1-D index selects, nothing where the rank does not have it."""
    positions, here = part.positions(index)
    found = with_row(base, dim).index_select(dim, positions)
    elsewhere = ~here.view([-1 if d == dim % found.ndim else 1 for d in range(found.ndim)])
    return found.masked_fill(elsewhere, nothing(found.dtype))


class _Indexed:
    """The dims of ``self[indices]``.

    Attributes:
        first: Where the dims of the index tensors are in the result.
        result: Letters of the result; ("index", k) are those of the index tensors.
        base: Letters of ``self``.
        indices: Letters of the index tensors.
        shape: Of the result.
        only: The dim that is indexed, if it is only one.
    """

    def __init__(self, call: OpCall) -> None:
        shape = tuple(call.layouts[0].shape)
        given: Sequence[Any] = call.named("indices")
        dims = [dim for dim, index in enumerate(given) if index is not None]
        broadcast = tuple(torch.broadcast_shapes(*(given[dim].shape for dim in dims)))
        adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
        self.first = dims[0] if adjacent else 0
        self.only = dims[0] if len(dims) == 1 else None
        self.base: Dims = tuple(
            (_OWN if dim == self.only else None) if dim in dims else dim
            for dim in range(len(shape))
        )
        rest = [dim for dim in range(len(shape)) if dim not in dims]
        before = [dim for dim in rest if adjacent and dim < self.first]
        after = rest[len(before) :]
        names = [("index", k) for k in range(len(broadcast))]
        self.result: Dims = (*before, *names, *after)
        self.shape = (*(shape[d] for d in before), *broadcast, *(shape[d] for d in after))
        self.indices: list[Dims] = [
            tuple(
                None if letter is None else names[letter]
                for letter in aligned(tuple(given[dim].shape), broadcast)
            )
            for dim in dims
        ]

    def without_index_letters(self, dims: Dims) -> Dims:
        """Return ``dims`` where the dims of index tensors have to be whole."""
        return tuple(None if isinstance(letter, tuple) else letter for letter in dims)


def _counts(call: OpCall) -> bool:
    """Whether there are indices, none of them a mask, which has as many as it is true."""
    given = [index for index in call.named("indices") if index is not None]
    return bool(given) and not any(i.dtype in (torch.bool, torch.uint8) for i in given)


def _index(call: OpCall) -> Signature | None:
    if not _counts(call):
        return None
    indexed = _Indexed(call)

    def of_part(part: Part) -> Function:
        dim = indexed.only or 0

        def select(base: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
            index = next(index for index in indices if index is not None)
            found = _selected(part, base, dim, part.wrapped(index.reshape(-1)))
            return found.unflatten(dim, index.shape) if index.ndim else found.squeeze(dim)

        return select

    return Signature(
        (indexed.base, *indexed.indices),
        (indexed.result,),
        reduce={_OWN: "sum"},
        linear=(frozenset({0}),),
        function=when_cut(call.func, indexed.only, of_part) if indexed.only is not None else None,
    )


def _index_put(call: OpCall) -> Signature | None:
    if not _counts(call):
        return None
    indexed = _Indexed(call)
    accumulates = bool(call.named("accumulate"))
    values = tuple(
        None if letter is None else indexed.result[letter]
        for letter in aligned(tuple(call.layouts[-1].shape), indexed.shape)
    )
    written = [*indexed.indices, values]
    if not accumulates:
        written = [indexed.without_index_letters(dims) for dims in written]
    last = len(call.layouts) - 1
    numeric = call.layouts[0].dtype is not torch.bool
    return Signature(
        (indexed.base, *written),
        (indexed.base,),
        reduce={name: "sum" for name in indexed.result if isinstance(name, tuple)},
        linear=(frozenset({0, last}),) if numeric else (),
        added=frozenset({0}),
        function=_put_function(call, indexed),
    )


def _put_function(call: OpCall, indexed: _Indexed) -> Any:
    dim = indexed.only
    if dim is None:
        return None

    def of_part(part: Part) -> Function:
        def put(
            base: Tensor,
            indices: Sequence[Tensor | None],
            values: Tensor,
            *rest: Any,
            **named: Any,
        ) -> Tensor:
            index = next(index for index in indices if index is not None)
            positions, taken = _taken(part, part.wrapped(index))
            shape = (*base.shape[:dim], *index.shape, *base.shape[dim + 1 :])
            rows = values.expand(shape)[(slice(None),) * dim + (taken,)]
            if not taken.ndim:  # a mask without dims adds one
                positions, taken = positions.view(1), taken.view(1)
            own = [None] * dim + [positions[taken]]
            return call.func(base, own, rows, *rest, **named)

        return put

    return when_cut(call.func, dim, of_part)


RULES: dict[OpOverload, Any] = {
    aten.index_select.default: _index_select,
    aten.index_add.default: partial(_index_write, added=True, linear=True),
    aten.index_copy.default: partial(_index_write, added=False, linear=True),
    aten.index_reduce.default: partial(_index_write, added=False, linear=False),
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
}
