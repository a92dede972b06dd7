"""The one device mesh of a plan, and the process group it stands on."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import name_group
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import group_timeout, set_timeout

from .agreement import barrier
from .process_group import this_device


def build_mesh(plan: ParallelPlan) -> DeviceMesh:
    """Return the plan's mesh, axes outermost first, without the axes of size 1.

    Every rank must call this.
    """
    axes = {name: size for name, size in plan.axes.items() if size > 1} or {"dp_shard": 1}
    barrier()
    mesh = init_device_mesh(this_device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for name in axes:
        set_timeout(mesh.get_group(name))
        name_group(mesh.get_group(name), name)
    return mesh


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along an axis, 1 if the mesh lacks it."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this rank's index along an axis, 0 if the mesh lacks it."""
    return mesh.get_local_rank(axis) if axis in (mesh.mesh_dim_names or ()) else 0


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """Return the ranks along an axis, None if the mesh lacks it."""
    return mesh.get_group(axis) if axis in (mesh.mesh_dim_names or ()) else None


def data_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that share a batch, innermost axis first."""
    groups = [axis_group(mesh, axis) for axis in ("dp_shard", "dp_replicate")]
    return [group for group in groups if group is not None]


def second_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return another group of the ranks along an axis. Every rank of the mesh must call this."""
    index = (mesh.mesh_dim_names or ()).index(axis)
    groups = mesh.mesh.movedim(index, -1).reshape(-1, mesh.size(index)).tolist()
    barrier()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=group_timeout())
    assert isinstance(own, dist.ProcessGroup)
    name_group(own, axis)
    return own
