"""Carry out the steps of a redistribution, on this rank or on all emulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale_dtensor._comm.emulation import coordinate_of, is_emulated, per_rank
from vescale_dtensor._comm.functional import is_traced
from vescale_dtensor._comm.ordered_reduce import Reduction, reduce_rows
from vescale_dtensor._comm.primitives import all_gather_rows, all_to_all_rows

from .element_counts import Coordinate
from .plan import plan_redistribution
from .steps import Mask, Piece, SendRecv, Step, Transfer, send_recv_of


def redistribute_local(
    local: Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> Tensor:
    """Return this rank's part of a tensor under other placements.

    Every rank of ``mesh`` must call this. Pending values are reduced in rank order, see
    [Note: pending reductions]; half precision accumulates in float32 and is rounded once per
    reduction. The bits do not depend on ``target``. A pending sum of booleans means "any".
    What becomes pending is the value on the first rank, or on all of them for avg, max and
    min; to reduce it again is exact, but for an average over some numbers of ranks, such as 7.

    Returns:
        ``local`` itself if nothing changes, else a new contiguous tensor.

    Raises:
        ValueError: If placements do not fit, see :func:`plan_redistribution`, or a pending
            reduction does not fit the dtype.
        TypeError: If a placement is of an unknown class.
    """
    steps = plan_redistribution(tuple(shape), tuple(mesh.shape), source, target)
    if not steps:
        return local
    _check_reductions(steps, local)
    if not shape:
        local = per_rank(_flat, mesh, local)
    for step in steps:
        local = _run(step, local, mesh)
    return local if shape else per_rank(_scalar, mesh, local)


def _check_reductions(steps: Sequence[Step], local: Tensor) -> None:
    for step in steps:
        if isinstance(step, Transfer) and step.reduce_op:
            Reduction(op=step.reduce_op).check(local.detach())


def _flat(_: Coordinate, local: Tensor) -> Tensor:
    return local.reshape(-1)


def _scalar(_: Coordinate, local: Tensor) -> Tensor:
    """Return the value of a scalar, or the empty tensor of a rank that has none."""
    return local.view(()) if local.numel() else local


def _run(step: Step, local: Tensor, mesh: DeviceMesh) -> Tensor:
    if isinstance(step, Mask):
        return per_rank(lambda c, x: _masked(step, c, x), mesh, local)
    if step.kind == "local":
        return per_rank(lambda c, x: _cut(step, send_recv_of(step, c), x), mesh, local)
    if step.kind == "all_gather":
        rows = all_gather_rows(per_rank(_flat, mesh, local), mesh, step.axes)
    else:
        packed = per_rank(lambda c, x: _packed_for_all(send_recv_of(step, c), x), mesh, local)
        numels = None if is_emulated() else send_recv_of(step, coordinate_of(mesh)).numels
        rows = all_to_all_rows(packed, numels, mesh, step.axes)
    if step.reduce_op is not None:
        how = Reduction(op=step.reduce_op)
        rows = per_rank(lambda _, got: [reduce_rows(got, how)], mesh, rows)
    return per_rank(
        lambda c, x, got: _assembled(step, send_recv_of(step, c), x, got), mesh, local, rows
    )


def _packed_for_all(send_recv: SendRecv, local: Tensor) -> list[Tensor]:
    return [_packed(local, pieces) for pieces in send_recv.sends]


def _packed(local: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Return pieces of a local tensor one after the other: 1-D."""
    parts = [piece.of(local).reshape(-1) for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else local.new_empty(0)


def _cut(step: Transfer, send_recv: SendRecv, local: Tensor) -> Tensor:
    """Return the new local tensor of a rank that has all of it."""
    sends, receives = send_recv.sends[send_recv.own], send_recv.receives[send_recv.own]
    if not step.embeds and len(sends) == 1:
        part = sends[0].of(local).clone(memory_format=torch.contiguous_format)
        return part.view(send_recv.shape)
    result = _fresh(step, send_recv, local)
    for source, target in zip(sends, receives, strict=True):
        target.of(result).copy_(source.of(local))
    return result


def _assembled(
    step: Transfer, send_recv: SendRecv, local: Tensor, rows: Sequence[Tensor]
) -> Tensor:
    """Return the new local tensor made of what came from every rank of the group."""
    if send_recv.stack_dim is not None and not step.embeds:
        return _stacked(send_recv, send_recv.stack_dim, rows)
    result = _fresh(step, send_recv, local)
    for place, row in enumerate(rows):
        parts = _parts(send_recv, place, row)
        for piece, part in zip(send_recv.receives[place], parts, strict=True):
            target = piece.of(result)
            target.copy_(part.view(target.shape) if part.ndim == 1 else part)
    return result


def _parts(send_recv: SendRecv, place: int, row: Tensor) -> Sequence[Tensor]:
    """Return the pieces that a rank of the group sent, out of what arrived from it."""
    if send_recv.gathers:
        sender = row.view(send_recv.source_shapes[place])
        return [piece.of(sender) for piece in send_recv.gathers[place]]
    return row.split([piece.numel for piece in send_recv.receives[place]])


def _fresh(step: Transfer, send_recv: SendRecv, local: Tensor) -> Tensor:
    if not step.embeds:
        return local.new_empty(send_recv.shape)
    return local.new_full(send_recv.shape, _identity("sum", local.dtype))


def _stacked(send_recv: SendRecv, dim: int, rows: Sequence[Tensor]) -> Tensor:
    """Return the rows along ``dim`` of the new local tensor, -1 for all of it flat."""
    if dim == -1:
        return _joined(rows).view(send_recv.shape)
    sizes = list(send_recv.shape)
    parts: list[Tensor] = []
    for pieces, row in zip(send_recv.receives, rows, strict=False):
        if pieces:
            sizes[dim] = pieces[0].outer[dim].stop - pieces[0].outer[dim].start
            parts.append(row.view(sizes))
    return torch.cat(parts, dim)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors; without a copy if they lie in memory that way, as a rule."""
    first = rows[0]
    if is_traced(first):
        return torch.cat(list(rows))
    position = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for row in rows:
        if row.storage_offset() != position or row.untyped_storage().data_ptr() != storage:
            return torch.cat(list(rows))
        position += row.numel()
    return first.as_strided((position - first.storage_offset(),), (1,))


def _masked(step: Mask, coordinate: Coordinate, local: Tensor) -> Tensor:
    fill = step.fill_at(coordinate)
    if fill is None:
        return local.clone(memory_format=torch.contiguous_format)
    value = _identity(fill, local.dtype)
    return torch.full_like(local, value, memory_format=torch.contiguous_format)


def _identity(op: Literal["sum", "product"], dtype: torch.dtype) -> float | complex:
    """Return what changes nothing; -0.0 for a sum, since 0.0 would turn -0.0 into 0.0."""
    if op == "product":
        return 1
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0
