"""The one device mesh of a plan, and the process group it stands on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import name_group
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import group_timeout, set_timeout

from .agreement import barrier
from .process_group import this_device

# The axes of ranks that share a batch. Which one is outside of which is up to the plan.
DATA_AXES = ("dp_replicate", "dp_shard", "ep")


def build_mesh(plan: ParallelPlan) -> DeviceMesh:
    """Return the plan's mesh, without the axes of size 1. Every rank must call this.

    Ranks are counted with the axes in the order of the plan, the last one fastest. In the mesh
    ``dp_shard`` is last: placements of one dim nest in its order, and what data-parallel ranks
    shard is a tensor-parallel rank's part. Ranks that share a sequence are ranks of the innermost
    data axis here, next to each other: parameters and gradients are theirs as of any data ranks.
    """
    sizes = plan.axes
    context, stage = sizes.pop("cp"), plan.data_parallel.zero_stage
    sizes["dp_shard" if stage else "dp_replicate"] *= context
    axes = {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}
    return _mesh_of(axes, sorted(axes, key="dp_shard".__eq__))


def state_mesh(plan: ParallelPlan, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh on which parameters are, as optimizers have them. Every rank must call this.

    It is the plan's, unless copies of a model share out its optimizer state. Then these ranks are
    on the axis ``dp_shard``, too, those of one shard of the model next to each other: what they
    hold together is what one of them sends when parameters are gathered.
    """
    if not plan.data_parallel.replicate_zero_stage:
        return mesh
    names = [*(mesh.mesh_dim_names or ())]
    ranks = mesh.mesh.movedim(names.index("dp_replicate"), -1).flatten(-2)
    return _named_mesh(ranks, [name for name in names if name != "dp_replicate"])


def batch_mesh(plan: ParallelPlan) -> DeviceMesh:
    """Return the mesh of ranks that share a batch, in the order in which rows are cut, and ``tp``.

    Of ranks that share a sequence each has its own. Every rank must call this; without a pipeline.
    """
    context = plan.context_parallel.size
    axes = {name: size for name, size in plan.axes.items() if size > 1}
    if context > 1:
        axes = {"dp_shard": plan.data_parallel.size, "cp": context}
        axes["tp"] = plan.tensor_parallel.size
    mesh = _mesh_of(axes, tuple(axes))
    if context == 1:
        return mesh
    return mesh["dp_shard", "tp"] if axes["tp"] > 1 else mesh["dp_shard"]


def _mesh_of(axes: Mapping[str, int], names: Sequence[str]) -> DeviceMesh:
    order = [[*axes].index(name) for name in names]
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values()).permute(order)
    return _named_mesh(ranks, names)


def _named_mesh(ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh:
    barrier()
    mesh = DeviceMesh(this_device().type, ranks, mesh_dim_names=tuple(names))
    for name in names:
        set_timeout(mesh.get_group(name))
        name_group(mesh.get_group(name), name)
    return mesh


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along an axis, 1 if the mesh lacks it."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this rank's index along an axis, 0 if the mesh lacks it."""
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names or ()
    assert coordinate is not None
    # Not get_local_rank: a group has its ranks in ascending order, whatever that of the mesh is.
    return coordinate[names.index(axis)] if axis in names else 0


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """Return the ranks along an axis, None if the mesh lacks it, or this rank is the only one."""
    return mesh.get_group(axis) if axis_size(mesh, axis) > 1 else None


def data_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that share a batch, innermost axis first."""
    groups = [axis_group(mesh, axis) for axis in reversed(data_axes(mesh))]
    return [group for group in groups if group is not None]


def data_axes(mesh: DeviceMesh) -> list[str]:
    """Return the axes of ranks that share a batch, those first whose ranks are furthest apart.

    The axes of a mesh are in the order in which placements nest, which is another one.
    """
    names = mesh.mesh_dim_names or ()
    origin = int(mesh.mesh.flatten()[0])

    def distance(axis: str) -> int:
        return int(mesh.mesh.select(names.index(axis), 1).flatten()[0]) - origin

    here = [axis for axis in DATA_AXES if axis_size(mesh, axis) > 1]
    return sorted(here, key=distance, reverse=True)


def cuts_rows_in_order(mesh: DeviceMesh) -> bool:
    """Whether rows that are sharded over the data axes of a mesh are in the batch's order.

    They are not where parameters are sharded over the outer one, ``ep`` being the other.
    """
    axes = data_axes(mesh)
    return axes == [name for name in mesh.mesh_dim_names or () if name in axes]


def rows_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data axes of a mesh."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name in DATA_AXES)]


def data_size(mesh: DeviceMesh) -> int:
    """Return the number of ranks that share a batch."""
    return math.prod(axis_size(mesh, axis) for axis in DATA_AXES)


def data_rank(mesh: DeviceMesh) -> int:
    """Return the index of this rank among those that share a batch."""
    rank = 0
    for axis in data_axes(mesh):
        rank = rank * axis_size(mesh, axis) + axis_rank(mesh, axis)
    return rank


def gradient_groups(
    mesh: DeviceMesh, *, of_experts: bool
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return over which ranks gradients are summed, those that have shards first, then copies.

    Of experts other ranks of the ``ep`` axis have none: tokens came here. A mesh has at most two
    data axes that are reduced over.
    """
    shards = axis_group(mesh, "dp_shard")
    axes = ("dp_replicate",) if of_experts else ("ep", "dp_replicate")
    copies = [group for axis in axes if (group := axis_group(mesh, axis)) is not None]
    if shards is None and len(copies) > 1:
        shards, *copies = copies
    return shards, copies[0] if copies else None


def context_group(mesh: DeviceMesh, size: int) -> dist.ProcessGroup | None:
    """Return the ranks that share a sequence, None if it is one. Every rank must call this."""
    if size == 1:
        return None
    return _subgroup(_data_ranks_last(mesh).reshape(-1, size).tolist(), "cp")


def _data_ranks_last(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of a mesh, those that share a batch last, in the order of its parts."""
    names = mesh.mesh_dim_names or ()
    axes = [names.index(name) for name in data_axes(mesh)]
    return mesh.mesh.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))


def second_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return another group of the ranks along an axis. Every rank of the mesh must call this."""
    index = (mesh.mesh_dim_names or ()).index(axis)
    return _subgroup(mesh.mesh.movedim(index, -1).reshape(-1, mesh.size(index)).tolist(), axis)


def _subgroup(groups: list[list[int]], axis: str) -> dist.ProcessGroup:
    barrier()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=group_timeout())
    assert isinstance(own, dist.ProcessGroup)
    name_group(own, axis)
    return own
