"""Reductions over ranks, to the bits of gloo.

[Note: gloo's ring] gloo cuts a tensor into one chunk for each rank, of whole segments. Chunk c
begins its way at rank c - 1, goes to the next lower rank, which adds it to its own, and ends at
rank c. So the order of additions differs from chunk to chunk; with two ranks it does not matter.
A reduction onto one rank cuts large tensors at other places than one for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MAX_SEGMENT_NBYTES = 1 << 20

_Op = Callable[..., Tensor]
_OPS: dict[Any, _Op] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def reduced(rows: Sequence[Tensor], op: Any, *, onto_one: bool = False) -> Tensor:
    """Return the reduction of tensors of one shape, by rank, as gloo makes it for all or one."""
    combine = _OPS.get(getattr(op, "op", op))
    if combine is None:
        raise NotImplementedError(f"an emulated rank cannot reduce with {op!r}")
    flat = [row.detach().reshape(-1) for row in rows]
    total = torch.empty_like(flat[0])
    chunk = (_chunk_numel_onto_one if onto_one else _chunk_numel)(flat[0], len(rows))
    for place in range(len(rows)):
        span = slice(place * chunk, (place + 1) * chunk)
        _fold([flat[(place - step - 1) % len(rows)][span] for step in range(len(rows))], combine,
              total[span])  # fmt: skip
    if getattr(op, "op", op) == dist.ReduceOp.AVG:
        total = total / len(rows)
    return total.view(rows[0].shape)


def _chunk_numel(flat: Tensor, num_ranks: int) -> int:
    nbytes, itemsize = flat.numel() * flat.itemsize, flat.itemsize
    wanted = max(-(-nbytes // _MAX_SEGMENT_NBYTES), 2 * num_ranks)
    per_rank = -(-wanted // num_ranks)
    segment = -(-nbytes // (per_rank * num_ranks))
    return per_rank * -(-segment // itemsize)


def _chunk_numel_onto_one(flat: Tensor, num_ranks: int) -> int:
    most = _MAX_SEGMENT_NBYTES // flat.itemsize
    segment = max(1, min(-(-flat.numel() // (2 * num_ranks)), most))
    return segment * -(-flat.numel() // (segment * num_ranks))


def _fold(parts: Sequence[Tensor], combine: _Op, out: Tensor) -> None:
    out.copy_(parts[0])
    for part in parts[1:]:
        combine(part, out, out=out)
