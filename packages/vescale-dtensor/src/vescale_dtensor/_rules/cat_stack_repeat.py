"""Operators that put tensors together or repeat them.

A dim along which tensors that are cut alike are put one after the other is interleaved then: no
rank needs more than it has. See :class:`vescale_dtensor.InterleavedShard`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from vescale_dtensor._layout.placements import is_sharded, single_dim
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import Dims, Repeated, Signature
from vescale_dtensor._torch_private import OpOverload

aten = torch.ops.aten


def _cat(call: OpCall) -> Signature:
    ndim = len(call.outputs[0].shape)
    dim = call.named("dim") % max(ndim, 1)
    joined = _joined_letter(call, dim, ndim)
    inputs: list[Dims] = [
        tuple(joined if d == dim else d for d in range(ndim))
        if len(made.shape) == ndim and not _is_legacy(made.shape, ndim)
        else (None,)
        for made in call.layouts
    ]
    repeated = joined if joined is None or len(inputs) == 1 else Repeated(joined, len(inputs))
    result = tuple(repeated if d == dim else d for d in range(ndim))
    return Signature(tuple(inputs), (result,), linear=_all_together(call))


def _is_legacy(shape: torch.Size, ndim: int) -> bool:
    """Whether this is the empty 1-D tensor that may be put together with any others."""
    return tuple(shape) == (0,) and ndim != 1


def _joined_letter(call: OpCall, dim: int, ndim: int) -> str | None:
    """Return a letter for the dim if the tensors are equally long and cut alike there."""
    if len({tuple(made.shape) for made in call.layouts}) > 1 or ndim == 0:
        return None
    cuts = {
        tuple(p if is_sharded(p) and single_dim(p) == dim else None for p in made.placements)
        for made in call.layouts
    }
    return "joined" if cuts and all(set(cut) <= {None, Shard(dim)} for cut in cuts) else None


def _all_together(call: OpCall) -> tuple[frozenset[int], ...]:
    """Return the set of all tensors: pending sums may be put together before they are added."""
    dtypes = {made.dtype for made in call.layouts}
    if len(dtypes) > 1:
        return ()
    return (frozenset(range(len(call.layouts))),)


def _stack(call: OpCall) -> Signature:
    ndim = len(call.outputs[0].shape)
    dim = call.named("dim") % ndim
    letters = tuple(range(ndim - 1))
    result = (*letters[:dim], None, *letters[dim:])
    return Signature((letters,) * len(call.layouts), (result,), linear=_all_together(call))


def _repeat(call: OpCall) -> Signature:
    letters = tuple(range(len(call.layouts[0].shape)))
    counts: list[int] = list(call.named("repeats"))
    added = len(counts) - len(letters)
    result = tuple(
        letter if count == 1 else Repeated(letter, count) if count else None
        for letter, count in zip(letters, counts[added:], strict=True)
    )
    kept = tuple(
        letter if count else None for letter, count in zip(letters, counts[added:], strict=True)
    )
    return Signature((kept,), ((*(None,) * added, *result),), linear=(frozenset({0}),))


RULES: dict[OpOverload, Any] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
}
