"""How the tensors of several ranks become one: in rank order, or as the backend likes.

[Note: rank order] A reduction is an all-to-all followed by a sum in rank order: the bytes of
a ring, and an order that no backend, message size or topology changes. An all-reduce gathers
the sums; a small one gathers the values and sums them everywhere, to the same bits.

"Parts" and "splits" are those of :mod:`.primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._torch_private import foreach_add_

from . import functional
from .groups import Peers
from .primitives import (
    Parts,
    Splits,
    all_gather_parts,
    all_to_all_parts,
    emulated_rows,
    library_all_reduce,
    library_reduce_scatter,
    tell_peers,
)

ReduceOrder = Literal["rank", "library"]


# All take out=, so that only the first of many makes a tensor.
_COMBINE: dict[ReduceOp, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
# No backend but NCCL has an average; a sum that is divided serves all.
_LIBRARY_OPS: dict[ReduceOp, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_ADDS = ("sum", "avg")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """What a reduction does.

    Attributes:
        op: How two values become one.
        order: Whether in rank order, or as the backend likes.
        accumulate: The dtype of the running total in rank order; None is float32 for half
            precision and otherwise the dtype of the tensor.
    """

    op: ReduceOp = "sum"
    order: ReduceOrder = "rank"
    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.op not in _COMBINE:
            raise ValueError(f"expected op to be one of {tuple(_COMBINE)}, got {self.op!r}")
        if self.order not in ("rank", "library"):
            raise ValueError(f"expected order 'rank' or 'library', got {self.order!r}")
        if self.order == "library" and self.accumulate is not None:
            raise ValueError(
                "expected no accumulate with order 'library', whose dtype is the backend's, "
                f"got {self.accumulate}"
            )

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError if ``tensor`` cannot be reduced so, or autograd could not follow."""
        dtype, wide = tensor.dtype, self.accumulate
        if wide is not None and torch.promote_types(dtype, wide) != wide:
            raise ValueError(
                f"expected accumulate to be a dtype that holds every value of {dtype}, got {wide}"
            )
        if self.op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"op 'avg' needs a floating-point or complex dtype, got {dtype}; use 'sum'"
            )
        if self.op in {"max", "min"} and dtype.is_complex:
            raise ValueError(f"op {self.op!r} needs a real dtype, got {dtype}")
        is_linear = self.op in {"sum", "avg"}
        if not is_linear and torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"op {self.op!r} is not differentiable, and the tensor requires grad; "
                "detach it, or call this under torch.no_grad()"
            )


def reduce_rows(rows: Sequence[Tensor], how: Reduction, out: Tensor | None = None) -> Tensor:
    """Reduce tensors of one shape and dtype, first to last, into a new one or ``out``."""
    first, *rest = rows
    dtype = first.dtype
    wide = how.accumulate or (torch.float32 if dtype in _HALF else dtype)
    combine = _COMBINE[how.op]
    if wide == dtype and rest:
        second, *rest = rest
        total: Tensor = combine(first, second, out=out)
    elif out is not None and wide == dtype:
        total = out.copy_(first)
    else:
        total = first.to(wide, copy=True)
    if rest and how.op in _ADDS and total.device.type == "cpu" and not functional.is_traced(total):
        # One operator for any number of rows. On a CPU it adds one after the other, as the loop
        # below; on a GPU it would add all at once.
        foreach_add_([total] * len(rest), rest)
    else:
        for row in rest:
            combine(total, row, out=total)
    if how.op == "avg":
        total.div_(len(rows))
    if wide == dtype:
        return total
    return total.to(dtype) if out is None else out.copy_(total)


def all_reduce_parts(parts: Parts, peers: Peers, how: Reduction) -> Parts:
    """Return the reduction of the peers' parts for each rank in this process."""
    num_ranks, shown = peers.num_ranks, parts[peers.shown]
    if num_ranks == 1:
        return [part.clone() for part in parts]
    if how.order == "library":
        return _library_all_reduce(parts, peers, how)
    shape, numel = shown.shape, shown.numel()
    row = -(-numel // num_ranks)
    if numel <= 2 * row:  # gathering all values sends no more, and is one collective
        return [reduce_rows(rows.unbind(), how) for rows in all_gather_parts(parts, peers)]
    arrived = all_to_all_parts([_as_rows(part, num_ranks, row) for part in parts], peers)
    reduced = [reduce_rows(rows.unbind(), how) for rows in arrived]
    gathered = all_gather_parts(reduced, peers)  # (ranks, row)
    if numel == num_ranks * row:
        return [rows.view(shape) for rows in gathered]
    return [rows.view(-1)[:numel].view(shape) for rows in gathered]


def reduce_scatter_parts(
    parts: Parts, splits: Splits | None, peers: Peers, how: Reduction
) -> Parts:
    """Return, for each rank in this process, the reduction of the splits meant for it.

    Without ``splits`` the parts are (ranks, *shape), a row for each rank.
    """
    num_ranks = peers.num_ranks
    if num_ranks == 1:
        return [part.squeeze(0).clone() if splits is None else part.clone() for part in parts]
    if how.order == "library":
        return _library_reduce_scatter(parts, splits, peers, how)
    if splits is None:
        return [reduce_rows(rows.unbind(), how) for rows in all_to_all_parts(parts, peers)]
    own = [sizes[peers.place_of(here)] for here, sizes in enumerate(splits)]
    if all(len(set(sizes)) == 1 for sizes in splits):
        arrived = all_to_all_parts(parts, peers)
    else:
        arrived = all_to_all_parts(
            parts, peers, splits, tuple((size,) * num_ranks for size in own)
        )
    return [
        reduce_rows(part.view(num_ranks, size, *part.shape[1:]).unbind(), how)
        for part, size in zip(arrived, own, strict=True)
    ]


def _as_rows(part: Tensor, num_ranks: int, row: int) -> Tensor:
    """Return the elements as (num_ranks, row), zeros at the end."""
    if part.numel() == num_ranks * row:
        return part.reshape(num_ranks, row)
    rows = part.new_zeros(num_ranks, row)
    rows.view(-1)[: part.numel()] = part.reshape(-1)
    return rows


def _library_all_reduce(parts: Parts, peers: Peers, how: Reduction) -> Parts:
    shown, num_ranks = parts[peers.shown], peers.num_ranks
    sent = 2 * (num_ranks - 1) * shown.numel() // num_ranks
    tell_peers("all_reduce", sent, shown.dtype, peers)
    if peers.emulated is not None:
        return [reduce_rows(rows, how) for rows in emulated_rows(parts, peers)]
    reduced = library_all_reduce(parts[0], _LIBRARY_OPS[how.op], peers)
    return [reduced.div_(num_ranks) if how.op == "avg" else reduced]


def _library_reduce_scatter(
    parts: Parts, splits: Splits | None, peers: Peers, how: Reduction
) -> Parts:
    if splits is None:
        one_each: Splits = ((1,) * peers.num_ranks,) * peers.num_here
        return [row.squeeze(0) for row in _library_reduce_scatter(parts, one_each, peers, how)]
    shown, sizes, num_ranks = parts[peers.shown], splits[peers.shown], peers.num_ranks
    sent = (num_ranks - 1) * max(sizes) * math.prod(shown.shape[1:])
    tell_peers("reduce_scatter", sent, shown.dtype, peers)
    if peers.emulated is None:
        reduced = library_reduce_scatter(parts[0], sizes, _LIBRARY_OPS[how.op], peers)
        return [reduced.div_(num_ranks) if how.op == "avg" else reduced]
    reduced = [reduce_rows(rows, how) for rows in emulated_rows(parts, peers)]
    return [
        whole.split(list(own_sizes))[peers.place_of(here)]
        for here, (whole, own_sizes) in enumerate(zip(reduced, splits, strict=True))
    ]
