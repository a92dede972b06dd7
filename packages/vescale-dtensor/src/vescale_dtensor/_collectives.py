"""Collectives whose bits depend on the values and the ranks alone.

A reduction is an all-to-all followed by a sum in rank order: the bytes of a ring, and an
order that no backend, message size or topology changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._failures import named_failures

# Renamed in torch 2.13, where the old name warns; remove the old one with torch 2.12.
_all_gather_single: Callable[..., object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


def all_gather_flat(flat: Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> Tensor:
    """Gather equal 1-D tensors over mesh axes. Every rank of ``mesh`` must call this.

    Args:
        flat: 1-D, the same numel on every rank.
        mesh: The mesh whose axes are gathered over.
        axes: Indices of mesh axes, ascending.

    Returns:
        One row per combination of coordinates along ``axes``, the last axis varying
        fastest: (product of axis sizes, numel).
    """
    gathered = flat.contiguous()
    for axis in reversed(axes):
        group = mesh.get_group(axis)
        parts = gathered.new_empty(mesh.size(axis) * gathered.numel())
        with named_failures():
            _all_gather_single(parts, gathered, group=group)
        gathered = parts
    return gathered.view(-1, flat.numel())


def ordered_all_reduce(
    value: Tensor,
    mesh: DeviceMesh,
    *,
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Tensor:
    """Reduce a small tensor over a whole mesh, in rank order. Every rank must call this.

    The bits of the result depend on the values and the mesh, not on the backend's
    algorithm. Bytes grow with the mesh size; meant for scalars and norms.
    """
    rows = all_gather_flat(value.reshape(-1), mesh, range(mesh.ndim))
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    return total.reshape(value.shape)


def all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather tensors of one shape, stacked in rank order. Every rank of ``group`` must call this.

    Returns:
        (group size, *local.shape).
    """
    ranks = dist.get_world_size(group)
    flat = local.new_empty(ranks * local.numel())
    with named_failures():
        _all_gather_single(flat, local.contiguous().view(-1), group=group)
    return flat.view(ranks, *local.shape)


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum row r of every rank onto rank r, in rank order. Every rank of ``group`` must call this.

    Half precision accumulates in float32.

    Args:
        rows: (group size, numel), row r meant for rank r.
        group: The ranks that take part.

    Returns:
        The sum of this rank's rows: (numel,).
    """
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    with named_failures():
        dist.all_to_all_single(received, rows.contiguous(), group=group)
    wide = (
        torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else rows.dtype
    )
    total = received[0].to(wide)
    for row in received[1:]:
        total = total + row
    return total.to(rows.dtype)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum tensors of one shape in rank order. Every rank of ``group`` must call this.

    Returns:
        A new tensor, bit-equal on every rank.
    """
    ranks = dist.get_world_size(group)
    numel = tensor.numel()
    rows = tensor.new_zeros(ranks, -(-numel // ranks))
    rows.view(-1)[:numel] = tensor.reshape(-1)
    return all_gather(reduce_scatter(rows, group), group).view(-1)[:numel].view(tensor.shape)
