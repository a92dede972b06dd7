"""The collectives that everything in this package is made of: all-gather and all-to-all.

No autograd and no checks: that is :mod:`.collectives`. They run between processes, eagerly or
as operators that a compiler sees, or between the parts of an emulated world. "Parts" are one
tensor for each rank that lives in this process: one, or all of an emulated world. "Splits" are
sizes along dim 0, one per peer, again for each rank that lives here. A rank that is alone sends
nothing, and tells nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import functional
from .emulation import RankTensor
from .events import Communication, CommunicationKind, is_anyone_listening, tell
from .failures import named_failures
from .groups import Peers, peers_along
from .in_place import all_gather_single, all_to_all_single, reduce_scatter_single
from .positions import Collective
from .profiling import collective_range, name_of
from .waiting import run_collective

Parts = Sequence[Tensor]
Splits = tuple[tuple[int, ...], ...]


def parts_of(tensor: Tensor, peers: Peers) -> Parts:
    """Return the tensor of each rank in this process. Autograd must not be recording it."""
    if peers.emulated is None:
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
    return parts[0] if peers.emulated is None else RankTensor(parts)


def all_gather_rows(flat: Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> list[Tensor]:
    """Return the 1-D tensors of all ranks along ``axes``, in row-major order of coordinates.

    All have the same numel; ``axes`` are ascending. Every rank of ``mesh`` must call this.
    """
    if not axes:
        return [flat]
    peers = peers_along(mesh, tuple(axes))
    stacked = all_gather_parts(parts_of(flat, peers), peers, ordered=False)
    order = peers.order or range(peers.num_ranks)
    return [joined([rows[place] for rows in stacked], peers) for place in order]


def all_gather_parts(parts: Parts, peers: Peers, *, ordered: bool = True) -> Parts:
    """Return, for each rank, the parts of its peers: (ranks, *shape). All are of one shape.

    They are in the order of peers, or in that of group ranks if not ``ordered``.
    """
    if peers.num_ranks == 1:
        return [part.unsqueeze(0).clone() for part in parts]
    shown = parts[peers.shown]
    tell_peers("all_gather", (peers.num_ranks - 1) * shown.numel(), shown.dtype, peers)
    if peers.emulated is not None:
        return [torch.stack([parts[peer] for peer in met]) for met in peers.emulated]
    rows = _all_gather(shown.unsqueeze(0), peers)
    if peers.order is None or not ordered:
        return [rows]
    return [torch.stack([rows[rank] for rank in peers.order])]


def all_gather_into(gathered: Tensor, part: Tensor, peers: Peers) -> None:
    """Write the tensors of all peers, (ranks, *shape), where they are wanted."""
    in_place = peers.num_ranks > 1 and peers.emulated is None and peers.order is None
    if not in_place or functional.is_traced(part):
        gathered.copy_(joined(all_gather_parts(parts_of(part, peers), peers), peers))
        return
    tell_peers("all_gather", (peers.num_ranks - 1) * part.numel(), part.dtype, peers)
    with (
        collective_range("all_gather", peers),
        named_failures(of=Collective("all_gather", peers, name_of)),
    ):
        run_collective(all_gather_single, gathered, part.unsqueeze(0), group=peers.group)


def all_gather_uneven_parts(parts: Parts, sizes: Splits, peers: Peers) -> Parts:
    """Return, for each rank, the parts of its peers one after the other along dim 0.

    Unequal parts are padded, unless that would more than double what is sent.
    """
    if peers.num_ranks == 1:
        return [part.clone() for part in parts]
    own_sizes = sizes[peers.shown]
    row = max(own_sizes)
    if row * peers.num_ranks > 2 * sum(own_sizes):
        copies = [torch.cat([part] * peers.num_ranks) for part in parts]
        sent = tuple((part.shape[0],) * peers.num_ranks for part in parts)
        return all_to_all_parts(copies, peers, sent, sizes)
    per_index = math.prod(parts[peers.shown].shape[1:])
    tell_peers("all_gather", (peers.num_ranks - 1) * row * per_index, parts[0].dtype, peers)
    if peers.emulated is not None:
        return [torch.cat([parts[peer] for peer in met]) for met in peers.emulated]
    gathered = _all_gather(_padded(parts[0], row), peers)
    if peers.order is None and min(own_sizes) == row:
        return [gathered]
    rows = gathered.view(peers.num_ranks, row, *gathered.shape[1:])
    ranks = peers.order or range(peers.num_ranks)
    return [torch.cat([rows[rank, :size] for rank, size in zip(ranks, own_sizes, strict=True)])]


def all_to_all_rows(
    outgoing: Sequence[Tensor], numels: Sequence[int] | None, mesh: DeviceMesh, axes: Sequence[int]
) -> list[Tensor]:
    """Send ``outgoing[i]`` to the i-th rank along ``axes``; return what the ranks sent here.

    ``outgoing`` has one 1-D tensor per rank, of any numel, in row-major order of coordinates;
    ``numels`` says what comes from each, and is not needed under emulation; ``axes`` are
    ascending. Every rank of ``mesh`` must call this.
    """
    peers = peers_along(mesh, tuple(axes))
    if peers.num_ranks == 1:
        return [outgoing[0].clone()]
    if is_anyone_listening():
        own = peers.place_of(peers.shown)
        numel = sum(part.numel() for place, part in enumerate(outgoing) if place != own)
        tell_peers("all_to_all", numel, outgoing[0].dtype, peers)
    if peers.emulated is None:
        assert numels is not None
        return _all_to_all_chunks(outgoing, numels, peers)
    chunks = zip(*(parts_of(part, peers) for part in outgoing), strict=True)
    arrived = _emulated_all_to_all([*chunks], peers.emulated)
    return [RankTensor([part.clone() for part in parts]) for parts in zip(*arrived, strict=True)]


def all_to_all_parts(
    parts: Parts, peers: Peers, sent: Splits | None = None, received: Splits | None = None
) -> Parts:
    """Send each peer its split along dim 0; return what the peers sent, in their order.

    ``sent`` and ``received`` say how much each peer gets and sends; without both splits are equal
    on all ranks.
    """
    if peers.num_ranks == 1:
        return [part.clone() for part in parts]
    if is_anyone_listening():
        shown = parts[peers.shown]
        length = shown.shape[0]
        own = length // peers.num_ranks
        if sent is not None:
            own = sent[peers.shown][peers.place_of(peers.shown)]
        sent_away = shown.numel() // max(length, 1) * (length - own)
        tell_peers("all_to_all", sent_away, shown.dtype, peers)
    if sent is None or received is None:
        if peers.emulated is None and peers.order is None:
            return [_all_to_all(parts[0], None, None, peers)]
        equally = (parts[0].shape[0] // peers.num_ranks,) * peers.num_ranks
        sent = received = (equally,) * peers.num_here
    if peers.emulated is not None:
        chunks = [part.split(list(sizes)) for part, sizes in zip(parts, sent, strict=True)]
        return [torch.cat(each) for each in _emulated_all_to_all(chunks, peers.emulated)]
    if peers.order is None:
        return [_all_to_all(parts[0], sent[0], received[0], peers)]
    chunks = parts[0].split(list(sent[0]))
    return [torch.cat(_all_to_all_chunks(chunks, received[0], peers))]


def _all_gather(part: Tensor, peers: Peers) -> Tensor:
    """Return the parts of all ranks along dim 0, in the order of group ranks."""
    assert peers.group is not None
    part = part.contiguous()
    if functional.is_traced(part):
        return functional.all_gather(part, peers.num_ranks, peers.group)
    gathered = part.new_empty(peers.num_ranks * part.shape[0], *part.shape[1:])
    with (
        collective_range("all_gather", peers),
        named_failures(of=Collective("all_gather", peers, name_of)),
    ):
        run_collective(all_gather_single, gathered, part, group=peers.group)
    return gathered


def _all_to_all_chunks(
    chunks: Sequence[Tensor], received: Sequence[int], peers: Peers
) -> list[Tensor]:
    """Send each peer its chunk; return what came from each, as views of one tensor."""
    places = peers.by_group_rank
    sent = [chunks[place].shape[0] for place in places]
    sizes = [received[place] for place in places]
    arrived = _all_to_all(torch.cat([chunks[place] for place in places]), sent, sizes, peers)
    pieces = arrived.split(sizes)
    return [pieces[rank] for rank in peers.order or range(peers.num_ranks)]


def _all_to_all(
    part: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, peers: Peers
) -> Tensor:
    """Send splits, equal ones if None; what arrives is in the order of group ranks, as they."""
    assert peers.group is not None
    part = part.contiguous()
    if functional.is_traced(part):
        equally = (part.shape[0] // peers.num_ranks,) * peers.num_ranks
        return functional.all_to_all(part, received or equally, sent or equally, peers.group)
    arrived = part.new_empty(part.shape[0] if received is None else sum(received), *part.shape[1:])
    with (
        collective_range("all_to_all", peers),
        named_failures(of=Collective("all_to_all", peers, name_of)),
    ):
        run_collective(
            all_to_all_single,
            arrived,
            part,
            None if received is None else list(received),
            None if sent is None else list(sent),
            group=peers.group,
        )
    return arrived


def all_to_all_into(arrived: Tensor, part: Tensor, peers: Peers) -> None:
    """Write what the peers sent in equal splits of dim 0 where it is wanted."""
    in_place = peers.num_ranks > 1 and peers.emulated is None and peers.order is None
    if not in_place or functional.is_traced(part):
        arrived.copy_(joined(all_to_all_parts(parts_of(part, peers), peers), peers))
        return
    away = part.numel() // peers.num_ranks * (peers.num_ranks - 1)
    tell_peers("all_to_all", away, part.dtype, peers)
    with (
        collective_range("all_to_all", peers),
        named_failures(of=Collective("all_to_all", peers, name_of)),
    ):
        run_collective(all_to_all_single, arrived, part, group=peers.group)


def _emulated_all_to_all(
    chunks: Sequence[Sequence[Tensor]], emulated: tuple[tuple[int, ...], ...]
) -> list[list[Tensor]]:
    """Return, for every rank, what each of its peers has for it."""
    return [
        [chunks[peer][emulated[peer].index(rank)] for peer in peers]
        for rank, peers in enumerate(emulated)
    ]


def library_all_reduce(part: Tensor, op: dist.ReduceOp.RedOpType, peers: Peers) -> Tensor:
    """Reduce in whatever order the backend likes. Between processes only."""
    reduced = part.clone(memory_format=torch.contiguous_format)
    with (
        collective_range("all_reduce", peers),
        named_failures(of=Collective("all_reduce", peers, name_of)),
    ):
        run_collective(dist.all_reduce, reduced, op, group=peers.group)
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
    with (
        collective_range("reduce_scatter", peers),
        named_failures(of=Collective("reduce_scatter", peers, name_of)),
    ):
        run_collective(reduce_scatter_single, reduced, part.contiguous(), op, group=peers.group)
    return reduced[: sizes[peers.place_of(0)]]


def emulated_rows(parts: Parts, peers: Peers) -> list[list[Tensor]]:
    """Return the parts of the peers of each emulated rank, and tell nobody."""
    assert peers.emulated is not None
    return [[parts[peer] for peer in met] for met in peers.emulated]


def tell_peers(kind: CommunicationKind, numel: int, dtype: torch.dtype, peers: Peers) -> None:
    """Let listeners know of a collective in which this rank sends ``numel`` elements."""
    if is_anyone_listening():
        nbytes = numel * dtype.itemsize
        over = name_of(peers)
        tell(Communication(kind, peers.mesh, peers.axes, peers.num_ranks, nbytes, dtype, over))


def _padded(part: Tensor, length: int) -> Tensor:
    missing = length - part.shape[0]
    if not missing:
        return part
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
