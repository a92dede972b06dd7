"""Whether the parts of a tensor fit its placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale_dtensor._comm.emulation import RankTensor, per_rank
from vescale_dtensor._comm.primitives import all_gather_rows
from vescale_dtensor._layout.boxes import local_shape
from vescale_dtensor._layout.layout import Layout, Placements, normalized
from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._redistribute.execute import redistribute_local

# The same numbers on every rank, which all have this version of torch.
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


def is_first_replica(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether no earlier coordinate, along axes that do not shard, holds the same elements."""
    return not any(
        index
        for index, placement in zip(coordinate, placements, strict=True)
        if not is_sharded(placement)
    )


def check_count(placements: Placements, mesh: DeviceMesh) -> None:
    """Raise ValueError unless there is one placement per mesh axis."""
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"expected one placement per mesh axis ({mesh.ndim}), got {tuple(placements)}"
        )


def check_stride(shape: Sequence[int] | None, stride: Sequence[int] | None) -> None:
    """Raise ValueError unless strides are those of a shape that is given, too."""
    if stride is not None and (shape is None or len(shape) != len(stride)):
        raise ValueError(
            f"expected strides of one per dim of shape={shape!r}, got stride={stride!r}"
        )


def target_of(
    tensor: DTensor, device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None
) -> Placements:
    """Return the placements ``tensor`` is to get, one per axis of its own mesh, or raise."""
    own = tensor.device_mesh
    if device_mesh is not None and device_mesh != own:
        raise ValueError(f"expected the tensor's own mesh {own}, got {device_mesh}")
    if placements is None:
        raise ValueError("expected one placement per mesh axis, got None")
    target = normalized(placements, tensor.ndim)
    check_count(target, own)
    return target


def check_local_shape(
    local_tensor: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> None:
    """Raise ValueError unless every rank's part is what ``placements`` make of ``shape``."""
    check_count(placements, mesh)

    def check(coordinate: tuple[int, ...], local: Tensor) -> None:
        expected = local_shape(shape, mesh.shape, coordinate, placements)
        if tuple(local.shape) != expected:
            raise ValueError(
                f"expected a local tensor of shape {expected} for global shape "
                f"{tuple(shape)} and placements {tuple(placements)} at {coordinate}, "
                f"got {tuple(local.shape)}; parts of other sizes need a RaggedShard"
            )

    per_rank(check, mesh, local_tensor)


def check_alike(local_tensor: Tensor, made: Layout) -> None:
    """Raise ValueError unless parts have one dtype, lie alike, and all or none require gradients.

    ``made`` has the strides that this rank found. Every rank of the mesh must call this.
    """

    def row(_: tuple[int, ...], part: Tensor) -> Tensor:
        told = (_DTYPES.index(part.dtype), int(part.requires_grad), *made.stride)
        return torch.tensor(told, dtype=torch.int64, device=made.mesh.device_type)

    axes = tuple(range(made.mesh.ndim))
    rows = all_gather_rows(per_rank(row, made.mesh, local_tensor), made.mesh, axes)
    found = per_rank(lambda _, *rows: [tuple(row.tolist()) for row in rows], made.mesh, *rows)
    if len(set(found)) > 1:
        described = [(_DTYPES[dtype], bool(grad), stride) for dtype, grad, *stride in found]
        raise ValueError(
            "expected parts of one dtype, all or none of which require gradients, whose dims are "
            f"in one order in memory; the ranks have (dtype, requires_grad, strides) {described}"
        )


def check_replicas(local_tensor: Tensor, made: Layout) -> None:
    """Raise ValueError unless ranks that are to hold the same do. All ranks call this."""
    whole = tuple(p if is_sharded(p) else Replicate() for p in made.placements)
    first = tuple(Partial() if type(p) is Replicate else p for p in whole)

    def keep(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
        kept = is_first_replica(coordinate, whole)
        return local.detach().clone() if kept else torch.zeros_like(local)

    kept = per_rank(keep, made.mesh, local_tensor)
    expected = redistribute_local(kept, made.mesh, made.shape, first, whole)

    def check(coordinate: tuple[int, ...], local: Tensor, of_first: Tensor) -> None:
        if not torch.equal(local, of_first):
            raise ValueError(f"the replica at {coordinate} differs from the first one")

    if not made.is_partial:
        per_rank(check, made.mesh, local_tensor.detach(), expected)


def check_of_one_rank(local: Tensor) -> None:
    """Refuse to give a compiler the parts of all emulated ranks: it reads the memory of one.

    Raises:
        NotImplementedError: With what to do instead.
    """
    if isinstance(local, RankTensor):
        raise NotImplementedError(
            "a compiled program cannot be given tensors of emulated ranks; run it without "
            "torch.compile in emulate(), or on processes"
        )
