"""Who takes part in a collective, and the ways in which tensors move between them.

No autograd and no checks: that is :mod:`.collectives`. Everything here takes and returns
"parts", one tensor for each rank that lives in this process: one, or all of an emulated world.
"Splits" are sizes along dim 0, one per peer, again for each rank that lives here. Peers are in
rank order: that of a process group, or row-major over mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .emulation import RankTensor, coordinate_of, is_emulated, peers_of_ranks
from .failures import named_failures
from .transport import CommunicationKind, group_of, tell

# Renamed in torch 2.13, where the old names warn; remove the old ones with torch 2.12.
_all_gather_single: Callable[..., object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., object] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

Parts = Sequence[Tensor]
Splits = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that act as one group.

    Attributes:
        num_ranks: How many there are.
        group: Their process group; None if this rank is alone, or ranks are emulated.
        order: The group rank of each peer; None if peers are in the order of group ranks.
        met: The peers of each emulated rank; None between processes.
        mesh: The mesh they were chosen from, if there was one.
        axes: The axes of it, ascending.
    """

    num_ranks: int
    group: dist.ProcessGroup | None
    order: tuple[int, ...] | None = None
    met: tuple[tuple[int, ...], ...] | None = None
    mesh: DeviceMesh | None = None
    axes: tuple[int, ...] = ()

    @property
    def num_here(self) -> int:
        """Number of ranks in this process."""
        return 1 if self.met is None else len(self.met)

    @property
    def by_group_rank(self) -> Sequence[int]:
        """The peers in the order of their group ranks."""
        everyone = range(self.num_ranks)
        return everyone if self.order is None else sorted(everyone, key=self.order.__getitem__)

    @property
    def shown(self) -> int:
        """Which of the ranks in this process is the one whose view Python code sees."""
        return 0 if self.met is None else dist.get_rank()

    def place_of(self, here: int) -> int:
        """Return the place among its peers of one of the ranks in this process."""
        if self.met is not None:
            return self.met[here].index(here)
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
        return _mesh_peers(where, _axis_indices(where, axes))
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
    return Peers(num_ranks, None, met=(tuple(range(num_ranks)),) * num_ranks)


def _mesh_peers(mesh: DeviceMesh, axes: tuple[int, ...]) -> Peers:
    num_ranks = math.prod(mesh.size(axis) for axis in axes)
    if is_emulated():
        return Peers(num_ranks, None, met=peers_of_ranks(mesh, axes), mesh=mesh, axes=axes)
    coordinate_of(mesh)
    if num_ranks == 1:
        return Peers(1, None, mesh=mesh, axes=axes)
    group, order = group_of(mesh, axes)
    is_sorted = order == tuple(range(num_ranks))
    return Peers(num_ranks, group, None if is_sorted else order, mesh=mesh, axes=axes)


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


def parts_of(tensor: Tensor, peers: Peers) -> Parts:
    """Return the tensor of each rank in this process. Autograd must not be recording it."""
    if peers.met is None:
        return (tensor,)
    if isinstance(tensor, RankTensor):
        return tensor.parts
    return (tensor,) * peers.num_here


def shapes_of(tensor: Tensor, peers: Peers) -> Sequence[torch.Size]:
    """Return the shape of the tensor of each rank in this process."""
    if isinstance(tensor, RankTensor):
        return [part.shape for part in tensor.parts]
    return (tensor.shape,) * peers.num_here


def joined(parts: Parts, peers: Peers) -> Tensor:
    """Return the parts as the one tensor that a program sees."""
    return parts[0] if peers.met is None else RankTensor(parts)


def stack(parts: Parts, peers: Peers) -> Parts:
    """Return, for each rank, the parts of its peers: (ranks, *shape). All are of one shape."""
    if peers.num_ranks == 1:
        return [part.unsqueeze(0).clone() for part in parts]
    shown = parts[peers.shown]
    tell_peers("all_gather", (peers.num_ranks - 1) * shown.numel(), shown.dtype, peers)
    if peers.met is not None:
        return [torch.stack([parts[peer] for peer in met]) for met in peers.met]
    rows = shown.new_empty((peers.num_ranks, *shown.shape))
    with named_failures():
        # As a row: gloo wants the rank of the result.
        _all_gather_single(rows, shown.contiguous().unsqueeze(0), group=peers.group)
    return [rows if peers.order is None else torch.stack([rows[rank] for rank in peers.order])]


def gather(parts: Parts, sizes: Splits, peers: Peers) -> Parts:
    """Return, for each rank, the parts of its peers one after the other along dim 0.

    Unequal parts are padded, unless that would more than double what is sent.
    """
    if peers.num_ranks == 1:
        return [part.clone() for part in parts]
    own_sizes = sizes[peers.shown]
    row = max(own_sizes)
    if row * peers.num_ranks > 2 * sum(own_sizes):
        return _gather_by_swap(parts, sizes, peers)
    per_index = math.prod(parts[peers.shown].shape[1:])
    tell_peers("all_gather", (peers.num_ranks - 1) * row * per_index, parts[0].dtype, peers)
    if peers.met is not None:
        return [torch.cat([parts[peer] for peer in met]) for met in peers.met]
    return [_gather_equal(parts[0], own_sizes, row, peers)]


def _gather_equal(part: Tensor, sizes: tuple[int, ...], row: int, peers: Peers) -> Tensor:
    gathered = part.new_empty(peers.num_ranks * row, *part.shape[1:])
    with named_failures():
        _all_gather_single(gathered, _padded(part, row).contiguous(), group=peers.group)
    if peers.order is None and min(sizes) == row:
        return gathered
    rows = gathered.view(peers.num_ranks, row, *part.shape[1:])
    ranks = peers.order or range(peers.num_ranks)
    return torch.cat([rows[rank, :size] for rank, size in zip(ranks, sizes, strict=True)])


def _gather_by_swap(parts: Parts, sizes: Splits, peers: Peers) -> Parts:
    copies = [torch.cat([part] * peers.num_ranks) for part in parts]
    sent = tuple((part.shape[0],) * peers.num_ranks for part in parts)
    return swap(copies, sent, sizes, peers)


def swap(parts: Parts, sent: Splits | None, received: Splits | None, peers: Peers) -> Parts:
    """Send each peer its split along dim 0; return what the peers sent, in their order.

    Args:
        parts: What to send.
        sent: How much of it each peer gets; None for equal splits on all ranks.
        received: How much comes from each peer; None for equal splits on all ranks.
        peers: Who takes part.
    """
    if peers.num_ranks == 1:
        return [part.clone() for part in parts]
    shown = parts[peers.shown]
    length = shown.shape[0]
    own = length // peers.num_ranks
    if sent is not None:
        own = sent[peers.shown][peers.place_of(peers.shown)]
    sent_away = shown.numel() // max(length, 1) * (length - own)
    tell_peers("all_to_all", sent_away, shown.dtype, peers)
    if peers.met is not None:
        return _emulated_swap(parts, sent, peers.met)
    if sent is None or received is None:
        return [_swap(parts[0], None, None, peers)]
    return [_swap(parts[0], sent[0], received[0], peers)]


def _swap(
    part: Tensor, sent: tuple[int, ...] | None, received: tuple[int, ...] | None, peers: Peers
) -> Tensor:
    order = peers.order
    if order is None:
        return _all_to_all(part, sent, received, peers)
    sent = sent or (part.shape[0] // peers.num_ranks,) * peers.num_ranks
    received = received or sent
    places = peers.by_group_rank
    chunks = part.split(list(sent))
    arrived = _all_to_all(
        torch.cat([chunks[place] for place in places]),
        tuple(sent[place] for place in places),
        tuple(received[place] for place in places),
        peers,
    ).split([received[place] for place in places])
    return torch.cat([arrived[rank] for rank in order])


def _all_to_all(
    part: Tensor, sent: tuple[int, ...] | None, received: tuple[int, ...] | None, peers: Peers
) -> Tensor:
    arrived = part.new_empty(part.shape[0] if received is None else sum(received), *part.shape[1:])
    with named_failures():
        dist.all_to_all_single(
            arrived,
            part.contiguous(),
            None if received is None else list(received),
            None if sent is None else list(sent),
            group=peers.group,
        )
    return arrived


def _emulated_swap(parts: Parts, sent: Splits | None, met: tuple[tuple[int, ...], ...]) -> Parts:
    chunks = [
        part.tensor_split(len(peers)) if sent is None else part.split(list(sent[rank]))
        for rank, (part, peers) in enumerate(zip(parts, met, strict=True))
    ]
    return [
        torch.cat([chunks[peer][met[peer].index(rank)] for peer in peers])
        for rank, peers in enumerate(met)
    ]


def library_all_reduce(part: Tensor, op: dist.ReduceOp.RedOpType, peers: Peers) -> Tensor:
    """Reduce in whatever order the backend likes. Between processes only."""
    reduced = part.clone(memory_format=torch.contiguous_format)
    with named_failures():
        dist.all_reduce(reduced, op, group=peers.group)
    return reduced


def library_reduce_scatter(
    part: Tensor, sizes: tuple[int, ...], op: dist.ReduceOp.RedOpType, peers: Peers
) -> Tensor:
    """Reduce in whatever order the backend likes; keep this rank's split. Between processes."""
    row = max(sizes)
    if peers.order is not None or min(sizes) < row:
        splits = part.split(list(sizes))
        part = torch.cat([_padded(splits[place], row) for place in peers.by_group_rank])
    reduced = part.new_empty(row, *part.shape[1:])
    with named_failures():
        _reduce_scatter_single(reduced, part.contiguous(), op, group=peers.group)
    return reduced[: sizes[peers.place_of(0)]]


def emulated_rows(parts: Parts, peers: Peers) -> list[list[Tensor]]:
    """Return the parts of the peers of each emulated rank, and tell nobody."""
    assert peers.met is not None
    return [[parts[peer] for peer in met] for met in peers.met]


def tell_peers(kind: CommunicationKind, numel: int, dtype: torch.dtype, peers: Peers) -> None:
    """Let listeners know of a collective in which this rank sends ``numel`` elements."""
    tell(kind, peers.num_ranks, numel, dtype, peers.mesh, peers.axes)


def _padded(part: Tensor, length: int) -> Tensor:
    missing = length - part.shape[0]
    if not missing:
        return part
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
