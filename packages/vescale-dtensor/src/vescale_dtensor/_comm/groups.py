"""Which ranks act as one group in a collective, and in what order.

Peers are in rank order: that of a process group, or row-major over mesh axes. A group over
several mesh axes is made at its first use, and kept as long as the job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._caches import forget_with_world, notice_world
from vescale_dtensor._logging import package_logger
from vescale_dtensor._torch_private import disable_current_modes

from .emulation import coordinate_of, is_emulated, peers_of_ranks
from .failures import named_failures


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that act as one group.

    Attributes:
        num_ranks: How many there are.
        group: Their process group; None if this rank is alone, or ranks are emulated.
        order: The group rank of each peer; None if peers are in the order of group ranks.
        emulated: The peers of each emulated rank; None between processes.
        mesh: The mesh they were chosen from, if there was one.
        axes: The axes of it, ascending.
    """

    num_ranks: int
    group: dist.ProcessGroup | None
    order: tuple[int, ...] | None = None
    emulated: tuple[tuple[int, ...], ...] | None = None
    mesh: DeviceMesh | None = None
    axes: tuple[int, ...] = ()

    @property
    def num_here(self) -> int:
        """Number of ranks in this process."""
        return 1 if self.emulated is None else len(self.emulated)

    @property
    def by_group_rank(self) -> Sequence[int]:
        """The peers in the order of their group ranks."""
        everyone = range(self.num_ranks)
        return everyone if self.order is None else sorted(everyone, key=self.order.__getitem__)

    @property
    def shown(self) -> int:
        """Which of the ranks in this process is the one whose view Python code sees."""
        return 0 if self.emulated is None else dist.get_rank()

    def place_of(self, here: int) -> int:
        """Return the place among its peers of one of the ranks in this process."""
        if self.emulated is not None:
            return self.emulated[here].index(here)
        if self.group is None:
            return 0
        rank = dist.get_rank(self.group)
        return rank if self.order is None else self.order.index(rank)


def peers_of(
    where: dist.ProcessGroup | DeviceMesh, axes: Sequence[int | str] | int | str | None
) -> Peers:
    """Return the ranks that ``where`` means.

    Raises:
        TypeError: If ``where`` is neither a mesh nor a group that this rank is in.
        ValueError: If ``axes`` do not fit, or this rank is not part of the mesh.
    """
    if isinstance(where, dist.ProcessGroup):
        return _group_peers(where, axes)
    if isinstance(where, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]: torch marks a rank outside of a group by another type
        return peers_along(where, _axis_indices(where, axes))
    raise TypeError(f"expected a device mesh or a group that this rank is in, got {where!r}")


def _group_peers(where: dist.ProcessGroup, axes: Sequence[int | str] | int | str | None) -> Peers:
    if axes is not None:
        raise ValueError(f"axes are those of a mesh; expected none for a group, got {axes!r}")
    num_ranks = where.size()
    if not is_emulated():
        return Peers(num_ranks, where if num_ranks > 1 else None)
    if num_ranks != dist.get_world_size():
        raise NotImplementedError(
            f"which ranks other ranks meet in a group of {num_ranks} of "
            f"{dist.get_world_size()} emulated ranks is not known; pass a mesh and axes"
        )
    return Peers(num_ranks, None, emulated=(tuple(range(num_ranks)),) * num_ranks)


_log = package_logger("vescale.dtensor")
_mesh_peers: dict[Any, Peers] = {}
forget_with_world(_mesh_peers.clear)


def peers_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> Peers:
    """Return the ranks along ``axes`` of ``mesh``, ascending indices, in row-major order.

    A group over several axes is made at its first use; every rank of the mesh takes part in
    that, and ranks elsewhere need not.

    Raises:
        ValueError: If this rank is not part of the mesh.
    """
    # The group itself, not its id: a later job's could have the same.
    key = (notice_world(), mesh, axes)
    found = _mesh_peers.get(key)
    if found is None:
        found = _mesh_peers[key] = _find_peers(mesh, axes)
    return found


def _find_peers(mesh: DeviceMesh, axes: tuple[int, ...]) -> Peers:
    num_ranks = math.prod(mesh.size(axis) for axis in axes)
    if is_emulated():
        emulated = peers_of_ranks(mesh, axes)
        return Peers(num_ranks, None, emulated=emulated, mesh=mesh, axes=axes)
    coordinate = coordinate_of(mesh)
    if num_ranks == 1:
        return Peers(1, None, mesh=mesh, axes=axes)
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    with disable_current_modes():
        ranks = [int(rank) for rank in mesh.mesh[index].flatten()]
    group = _group_of(mesh, axes, ranks)
    order = tuple(dist.get_group_rank(group, rank) for rank in ranks)
    is_sorted = order == tuple(range(num_ranks))
    return Peers(num_ranks, group, None if is_sorted else order, mesh=mesh, axes=axes)


def _group_of(mesh: DeviceMesh, axes: tuple[int, ...], ranks: list[int]) -> dist.ProcessGroup:
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if len(ranks) == dist.get_world_size():
        return cast(dist.ProcessGroup, dist.group.WORLD)
    timeout = _timeout_for(mesh)
    _log.info("making process groups over axes %s of %s", axes, mesh)
    with named_failures():
        made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return cast(dist.ProcessGroup, made)


def _timeout_for(mesh: DeviceMesh) -> timedelta | None:
    """Return the shortest wait of the job's group and the mesh's, None if none is known.

    torch gives a new group its default of 30 minutes, however soon the job wants to know that
    a rank is dead.
    """
    groups = [cast(dist.ProcessGroup, dist.group.WORLD), *mesh.get_all_groups()]
    found = [timeout_of(group, mesh.device_type) for group in groups]
    return min((timeout for timeout in found if timeout is not None), default=None)


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Return how long ``group`` waits for a rank, None where its backend does not say."""
    backend: Any = group._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _axis_indices(
    mesh: DeviceMesh, axes: Sequence[int | str] | int | str | None
) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(mesh.ndim))
    asked = (axes,) if isinstance(axes, int | str) else tuple(axes)
    names = mesh.mesh_dim_names or ()
    known = {*names, *range(mesh.ndim)}
    unknown = [axis for axis in asked if axis not in known]
    if unknown:
        raise ValueError(f"expected axes of {mesh}, got {unknown}")
    indices = tuple(names.index(axis) if isinstance(axis, str) else axis for axis in asked)
    if list(indices) != sorted(set(indices)):
        raise ValueError(f"expected axes in the order of {mesh}, each once, got {asked}")
    return indices
