"""Collectives of torch.distributed as gloo does them best: on the memory they are called with.

[Note: gathers of gloo] gloo gathers to memory of its own and copies that to where it is wanted. A
broadcast writes where it is wanted, so a large gather of few ranks is one from each of them: half
of the processor time, and none of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, where the old names warn; remove the old ones with torch 2.12.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., object] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

# What gloo does not know, and what of the same width it sends in its place: bits are only moved.
_SENT_AS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# Of smaller ones, or of more ranks, what it takes to start a broadcast would count.
_LEAST_BYTES, _MOST_RANKS = 2**16, 8


def all_gather_single(
    out: Tensor, part: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Do what ``torch.distributed.all_gather_single`` does; see [Note: gathers of gloo]."""
    out, part = _as_sent(out), _as_sent(part)
    if out.nbytes < _LEAST_BYTES or not _is_small_gloo(out, group):
        return _all_gather_single(out, part, group=group, async_op=async_op)
    rows = out.view(dist.get_world_size(group), *part.shape).unbind()
    own = rows[dist.get_rank(group)]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    works = [
        dist.broadcast(row, group=group, group_src=rank, async_op=True)
        for rank, row in enumerate(rows)
    ]
    gathered = _Several([work for work in works if work is not None])
    return gathered if async_op else gathered.wait()


def all_to_all_single(
    out: Tensor,
    part: Tensor,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    *,
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> Any:
    """Do what ``torch.distributed.all_to_all_single`` does, of all dtypes."""
    return dist.all_to_all_single(
        _as_sent(out), _as_sent(part), received, sent, group=group, async_op=async_op
    )


def _as_sent(x: Tensor) -> Tensor:
    dtype = _SENT_AS.get(x.dtype)
    return x if dtype is None else x.view(dtype)


def _is_small_gloo(out: Tensor, group: dist.ProcessGroup | None) -> bool:
    if out.device.type != "cpu" or dist.get_world_size(group) > _MOST_RANKS:
        return False
    known: Any = dist.group.WORLD if group is None else group
    # Not every build of torch has gloo.
    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    return gloo is not None and isinstance(known._get_backend(torch.device("cpu")), gloo)


class _Several:
    """Waits for all of some works."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._left = list(works)

    def wait(self, *timeout: timedelta) -> None:
        while self._left:
            self._left[0].wait(*timeout)
            del self._left[0]

    def is_completed(self) -> bool:
        """Whether the one that is waited for, or all, came to an end."""
        return not self._left or self._left[0].is_completed()


def reduce_scatter_single(
    out: Tensor,
    part: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> object:
    """Do what ``torch.distributed.reduce_scatter_single`` does."""
    if out.device.type != "cpu":
        return _reduce_scatter_single(out, part, op, group=group, async_op=async_op)
    # As gloo does it, whose own cannot be waited for with a timeout, and never says that it ended.
    summed = part.clone()
    work = dist.all_reduce(summed, op, group=group, async_op=True)
    own = summed.narrow(0, dist.get_rank(group) * out.shape[0], out.shape[0])
    wanted = _PartOfSum(work, own, out)
    return wanted if async_op else wanted.wait()


class _PartOfSum:
    """Copies what is wanted of a sum when that was waited for."""

    def __init__(self, work: dist.Work | None, own: Tensor, out: Tensor) -> None:
        self._work, self._own, self._out = work, own, out

    def wait(self, *timeout: timedelta) -> None:
        if self._work is not None:
            self._work.wait(*timeout)
        self._out.copy_(self._own)

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()
