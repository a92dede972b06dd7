"""The collectives that everything in this package is made of, and who hears of them.

Two are enough: equal all-gathers and all-to-alls of any sizes, over one mesh axis or several at
once. Both run between processes, or between the parts of an emulated world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._caches import forget_with_world, notice_world
from vescale_dtensor._torch_private import disable_current_modes

from .emulation import RankTensor, is_emulated, peers_of_ranks
from .failures import named_failures
from .functional import all_gather, all_to_all, is_traced

# Renamed in torch 2.13, where the old name warns; remove the old one with torch 2.12.
_all_gather_single: Callable[..., object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)

CommunicationKind = Literal["all_gather", "all_to_all", "all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, as this rank saw it.

    Attributes:
        kind: What was called. The reductions are those of a backend's own order; a reduction
            in rank order is made of the other two.
        mesh: On which mesh; None for a bare process group.
        axes: Over which of its axes, as one group.
        num_ranks: How many ranks took part.
        nbytes: Sent by this rank to others; for a backend's reduction, what a ring sends.
        dtype: Of the elements.
    """

    kind: CommunicationKind
    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    num_ranks: int
    nbytes: int
    dtype: torch.dtype


_listeners: list[Callable[[Communication], None]] = []


@contextmanager
def listening(listener: Callable[[Communication], None]) -> Iterator[None]:
    """Call ``listener`` for every collective this rank takes part in."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(
    kind: CommunicationKind,
    num_ranks: int,
    numel: int,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    axes: tuple[int, ...] = (),
) -> None:
    """Let the listeners know of a collective that sends ``numel`` elements to others."""
    if _listeners:
        event = Communication(kind, mesh, axes, num_ranks, numel * dtype.itemsize, dtype)
        for listener in _listeners:
            listener(event)


def gather_rows(flat: Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> list[Tensor]:
    """Return the 1-D tensors of all ranks along ``axes``, in row-major order of coordinates.

    Args:
        flat: 1-D, of the same numel on every rank.
        mesh: Every rank of it must call this.
        axes: Indices of mesh axes, ascending; they act as one group.
    """
    axes = tuple(axes)
    if not axes:
        return [flat]
    num_ranks = _num_ranks(mesh, axes)
    tell("all_gather", num_ranks, (num_ranks - 1) * flat.numel(), flat.dtype, mesh, axes)
    if is_emulated():
        return _emulated_gather(cast(RankTensor, flat), peers_of_ranks(mesh, axes))
    group, order = group_of(mesh, axes)
    if is_traced(flat):
        gathered = all_gather(flat.contiguous(), num_ranks, group)
    else:
        gathered = flat.new_empty(num_ranks * flat.numel())
        with named_failures():
            _all_gather_single(gathered, flat.contiguous(), group=group)
    rows = gathered.view(num_ranks, flat.numel())
    return [rows[place] for place in order]


def exchange(
    outgoing: Sequence[Tensor], numels: Sequence[int] | None, mesh: DeviceMesh, axes: Sequence[int]
) -> list[Tensor]:
    """Send ``outgoing[i]`` to the i-th rank along ``axes``; return what the ranks sent here.

    Args:
        outgoing: 1-D, one per rank in row-major order of coordinates; any numels.
        numels: What comes from each rank. Not needed, and not looked at, under emulation.
        mesh: Every rank of it must call this.
        axes: Indices of mesh axes, ascending; they act as one group.
    """
    axes = tuple(axes)
    if is_emulated():
        peers = peers_of_ranks(mesh, axes)
        if _listeners:
            _tell_sent(outgoing, peers[dist.get_rank()].index(dist.get_rank()), mesh, axes)
        return _emulated_exchange(cast("Sequence[RankTensor]", outgoing), peers)
    assert numels is not None
    group, order = group_of(mesh, axes)
    own = _own_place(mesh, axes)
    if _listeners:
        _tell_sent(outgoing, own, mesh, axes)
    by_group_rank = sorted(range(len(order)), key=lambda place: order[place])
    sent = torch.cat([outgoing[place] for place in by_group_rank])
    received_numels = [numels[place] for place in by_group_rank]
    sent_numels = [outgoing[place].numel() for place in by_group_rank]
    if is_traced(sent):
        received = all_to_all(sent, received_numels, sent_numels, group)
    else:
        received = sent.new_empty(sum(numels))
        with named_failures():
            dist.all_to_all_single(received, sent, received_numels, sent_numels, group=group)
    chunks = received.split(received_numels)
    return [chunks[order[place]] for place in range(len(order))]


_groups: dict[Any, tuple[dist.ProcessGroup, tuple[int, ...]]] = {}


def group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """Return the group of the ranks along ``axes``, and their ranks in it, row-major.

    A group over several axes is made at its first use; every rank of the mesh takes part in
    that, and ranks elsewhere need not.
    """
    # The group itself, not its id: a later job's could have the same.
    key = (notice_world(), mesh, axes)
    found = _groups.get(key)
    if found is None:
        found = _groups[key] = _make_group(mesh, axes)
    return found


forget_with_world(_groups.clear)


def _make_group(
    mesh: DeviceMesh, axes: tuple[int, ...]
) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if a in axes else c for a, c in enumerate(coordinate))
    with disable_current_modes():
        ranks = [int(rank) for rank in mesh.mesh[index].flatten()]
    if len(axes) == 1:
        group = mesh.get_group(axes[0])
    elif len(ranks) == dist.get_world_size():
        group = cast(dist.ProcessGroup, dist.group.WORLD)
    else:
        timeout = _timeout_for(mesh)
        with named_failures():
            made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        group = cast(dist.ProcessGroup, made)
    return group, tuple(dist.get_group_rank(group, rank) for rank in ranks)


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


def _own_place(mesh: DeviceMesh, axes: tuple[int, ...]) -> int:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    return place


def _num_ranks(mesh: DeviceMesh, axes: tuple[int, ...]) -> int:
    total = 1
    for axis in axes:
        total *= mesh.size(axis)
    return total


def _tell_sent(
    outgoing: Sequence[Tensor], own: int, mesh: DeviceMesh, axes: tuple[int, ...]
) -> None:
    numel = sum(part.numel() for place, part in enumerate(outgoing) if place != own)
    tell("all_to_all", _num_ranks(mesh, axes), numel, outgoing[0].dtype, mesh, axes)


def _emulated_gather(flat: RankTensor, peers: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [
        RankTensor([flat.parts[group[place]].clone() for group in peers])
        for place in range(len(peers[0]))
    ]


def _emulated_exchange(
    outgoing: Sequence[RankTensor], peers: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    received: list[Tensor] = []
    for place in range(len(peers[0])):
        parts = [
            outgoing[group.index(rank)].parts[group[place]].clone()
            for rank, group in enumerate(peers)
        ]
        received.append(RankTensor(parts))
    return received
