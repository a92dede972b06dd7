"""Cut a full tensor into the parts of a distributed one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor._comm.emulation import coordinate_of, per_rank
from vescale_dtensor._comm.primitives import all_to_all_rows
from vescale_dtensor._layout.boxes import local_boxes, local_shape
from vescale_dtensor._layout.layout import Placements, layout, normalized, replicated
from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._redistribute.execute import redistribute_local
from vescale_dtensor._torch_private import DISTRIBUTED, default_mesh

from .checks import check_count
from .dtensor import DTensor, as_dtensor, wrap
from .strides import dense_stride, in_memory_order


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Cut this rank's part out of a full tensor that every rank already holds.

    No communication: unlike torch's function of the same name, nothing is sent unless
    ``src_data_rank`` says from where. The result is a leaf of autograd that requires a gradient
    if ``tensor`` does; dims keep their order in memory.

    Args:
        tensor: The global tensor, equal on every rank unless ``src_data_rank`` is given.
        device_mesh: The mesh to distribute over.
        placements: One per mesh axis, outermost first; ``Replicate`` if not given. ``Partial``
            leaves the value on the first rank and nothing on the others.
        src_data_rank: The index, along every mesh axis, of the rank whose tensor is meant. It
            sends every other rank its part, so every rank of the mesh must call this, with a
            tensor of the same shape, strides and dtype. None, unlike torch's 0, sends nothing.

    Raises:
        ValueError: If the tensor is distributed already and otherwise, or is not a leaf of
            autograd, or no rank of the mesh has that index along every axis.
    """
    mesh = device_mesh or default_mesh()
    given = replicated(mesh) if placements is None else normalized(placements, tensor.ndim)
    check_count(given, mesh)
    if isinstance(tensor, DISTRIBUTED):
        return _already(cast(Any, tensor), mesh, given)
    if not tensor.is_leaf:
        raise ValueError(
            "expected a leaf of autograd, got a tensor that was computed of others, to which no "
            "gradient would flow back; distribute the others, or tensor.detach(). Take "
            "DTensor.from_local() for a part that was computed"
        )
    if src_data_rank is None:
        full = per_rank(lambda _, whole: whole.clone(), mesh, tensor.detach())
        local = redistribute_local(full, mesh, tensor.shape, replicated(mesh), given)
    else:
        local = _from_rank(src_data_rank, tensor.detach(), mesh, given)
    made = layout(mesh, given, tensor.shape, dense_stride(tensor), tensor.dtype)
    result = wrap(in_memory_order(local, made.stride), made)
    return cast(DTensor, result.requires_grad_(tensor.requires_grad))


def _already(tensor: Any, mesh: DeviceMesh, placements: Placements) -> DTensor:
    if tensor.device_mesh != mesh or tuple(tensor.placements) != placements:
        raise ValueError(
            f"expected a plain tensor, or one that has {placements} on {mesh}, got a distributed "
            f"one of {tuple(tensor.placements)} on {tensor.device_mesh}; redistribute() it"
        )
    return as_dtensor(tensor)


def _from_rank(source: int, tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    """Return the part that the rank of index ``source`` along every axis sends here."""
    if not 0 <= source < min(mesh.shape):
        raise ValueError(
            f"expected src_data_rank to be an index along every axis of {mesh}, or None for the "
            f"tensor that this rank has, got {source}"
        )
    held = tuple(p if is_sharded(p) else Replicate() for p in placements)
    shape, sizes = tuple(tensor.shape), tuple(mesh.shape)
    coordinates = list(product(*map(range, sizes)))
    sender = (source,) * mesh.ndim

    def outgoing(coordinate: tuple[int, ...], whole: Tensor) -> list[Tensor]:
        if coordinate != sender:
            return [whole.new_empty(0) for _ in coordinates]
        return [_part(whole, sizes, each, held).reshape(-1) for each in coordinates]

    def arrived(coordinate: tuple[int, ...], rows: list[Tensor]) -> Tensor:
        own = local_shape(shape, sizes, coordinate, held)
        return rows[coordinates.index(sender)].view(own)

    own_numel = torch.Size(local_shape(shape, sizes, coordinate_of(mesh), held)).numel()
    numels = [own_numel if each == sender else 0 for each in coordinates]
    sent = per_rank(outgoing, mesh, tensor)
    rows = all_to_all_rows(sent, numels, mesh, tuple(range(mesh.ndim)))
    local = per_rank(arrived, mesh, rows)
    return redistribute_local(local, mesh, shape, held, placements)


def _part(
    whole: Tensor, sizes: tuple[int, ...], coordinate: tuple[int, ...], held: Placements
) -> Tensor:
    """Return the local tensor of another rank."""
    shape = tuple(whole.shape)
    part = whole.new_empty(local_shape(shape, sizes, coordinate, held))
    for box in local_boxes(shape, sizes, coordinate, held):
        box.of(part).copy_(whole[box.box.slices])
    return part
