"""The one device mesh of a plan, and the process group it stands on."""

from __future__ import annotations

import atexit
import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import named_failures
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import set_timeout

# Longer than any step; a collective that takes as long is a bug or a dead rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def this_device() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start_process_group() -> None:
    """Join torchrun's process group, or a group of one without torchrun, if nobody did yet."""
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(plan: ParallelPlan) -> DeviceMesh:
    """Return the plan's mesh, axes outermost first, without the axes of size 1.

    Every rank must call this.
    """
    axes = {name: size for name, size in plan.axes.items() if size > 1} or {"dp_shard": 1}
    meet()
    mesh = init_device_mesh(this_device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for name in axes:
        set_timeout(mesh.get_group(name))
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
    meet()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(own, dist.ProcessGroup)
    return own


def meet() -> None:
    """Wait for all ranks, or raise what one of them did. Every rank must call this.

    New process groups meet by way of the store, which does not know that a rank has died: the
    others would wait there for their timeout. What user code does on one rank comes before this.
    """
    check_agreement()


def check_agreement(**described: str) -> None:
    """Raise on every rank if ranks were given different things. Every rank must call this.

    Args:
        described: What to compare, by the name the error uses.

    Raises:
        ValueError: Naming what differs and the ranks that differ from rank 0.
    """
    digests = {k: hashlib.sha256(v.encode()).hexdigest()[:16] for k, v in described.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    with named_failures():
        dist.all_gather_object(everyone, digests)
    for name in described:
        differing = [r for r, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]
        if differing:
            raise ValueError(
                f"expected the same {name} on every rank, but ranks {differing} differ from "
                f"rank 0; this is rank {dist.get_rank()} with {described[name][:500]!r}"
            )
