"""Turn shards that lie in many short pieces of a file into slabs that each rank writes at once.

[Note: slabs]
A tensor sharded along its columns reaches the file in pieces of a fraction of a row. Instead of
writing those, the ranks of the tensor's mesh divide its bytes into one consecutive slab each
and send one another what belongs there; the network is faster than short writes. Which bytes
go where follows from the placements, so nothing but the bytes themselves is sent. The packed
bytes of a box are in the order of the file, so what a slab needs of a box is one piece of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import Box, InterleavedShard, local_boxes

from ._boxes import Part, is_first_replica
from ._files import StoredTensor
from ._group import Ranks
from ._runs import Bytes, Runs, runs_of
from ._stream import FileWriter
from ._tensor_bytes import flat_bytes

MIN_RUN_NBYTES = 256 << 10
_MIN_TENSOR_NBYTES = 1 << 20
_MAX_RANKS = 256
_ROUND_NBYTES = 4 << 20
_PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class _Holder:
    """A rank that holds boxes of the tensor, and where their bytes go in the file."""

    rank: int
    boxes: tuple[Runs, ...]


@dataclass(frozen=True, slots=True)
class _Slab:
    """Consecutive bytes of the file that one rank writes."""

    rank: int
    start: int
    stop: int

    def round(self, number: int) -> tuple[int, int]:
        """Return the bytes of the slab that are exchanged in one round; perhaps none."""
        start = min(self.start + number * _ROUND_NBYTES, self.stop)
        return start, min(start + _ROUND_NBYTES, self.stop)


class Scratch:
    """Memory that stays allocated from one round to the next."""

    def __init__(self) -> None:
        self._arrays: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """Return ``nbytes`` of the memory called ``name``, whatever is in it."""
        if name not in self._arrays or len(self._arrays[name]) < nbytes:
            self._arrays[name] = np.empty(nbytes, np.uint8)
        return self._arrays[name][:nbytes]


def needs_slabs(part: Part, itemsize: int) -> bool:
    """Return whether a tensor's shards are better exchanged; the same answer on every rank."""
    if part.mesh_ranks is None or not 1 < len(part.mesh_ranks) <= _MAX_RANKS:
        return False
    if itemsize * math.prod(part.shape) < _MIN_TENSOR_NBYTES:
        return False
    if not any(_cuts_rows(placement) for placement in part.placements):
        return False
    box = next(boxes[0] for boxes in _boxes_by_rank(part).values() if boxes)
    runs = runs_of(part.shape, box, itemsize)
    return len(runs.offsets) > 1 and runs.nbytes < MIN_RUN_NBYTES


def _cuts_rows(placement: Placement) -> bool:
    if isinstance(placement, Shard | InterleavedShard):
        return placement.dim > 0 or isinstance(placement, InterleavedShard)
    return False


def write_slabs(
    writer: FileWriter | None, stored: StoredTensor, part: Part, ranks: Ranks, scratch: Scratch
) -> Exception | None:
    """Exchange a tensor's bytes and write this rank's slab. Every rank must call this.

    Args:
        writer: Where to write; None to take part only, because writing has failed already.
        stored: Where the tensor lies.
        part: What this rank holds of it.
        ranks: All ranks, whether they hold something of it or not.
        scratch: Memory to use.

    Returns:
        What went wrong when writing: the other ranks cannot do without this one's bytes, so it
        must not be raised before everything is exchanged.
    """
    assert part.mesh_ranks is not None
    holders = [
        _Holder(rank, tuple(_runs(stored, box) for box in boxes))
        for rank, boxes in _boxes_by_rank(part).items()
    ]
    slabs = _slabs(stored, holders, part.mesh_ranks)
    own_slab = next((slab for slab in slabs if slab.rank == ranks.rank), None)
    own_boxes = next((holder.boxes for holder in holders if holder.rank == ranks.rank), ())
    packed = [_packed(part.local[held.local_slices]) for held in part.boxes] if own_boxes else []
    failure: Exception | None = None
    longest = max(slab.stop - slab.start for slab in slabs)
    for number in range(-(-longest // _ROUND_NBYTES)):
        sent = _outgoing(slabs, own_boxes, packed, number, ranks.size)
        start, stop = (0, 0) if own_slab is None else own_slab.round(number)
        counts = _incoming_counts(holders, start, stop, ranks.size)
        received = _exchange(sent, counts, ranks, scratch)
        if writer is not None and failure is None and start < stop:
            try:
                slab = scratch.take("slab", stop - start)
                writer.write(start, _assembled(holders, received, counts, start, slab))
            except Exception as error:
                failure = error
    return failure


def _boxes_by_rank(part: Part) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of the first replicas."""
    assert part.mesh_ranks is not None
    boxes = _boxes_by_coordinate(part.shape, part.mesh_shape, part.placements)
    return {
        rank: boxes[coordinate]
        for rank, coordinate in zip(part.mesh_ranks, _coordinates(part.mesh_shape), strict=True)
        if coordinate in boxes
    }


def _coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in mesh_shape)))


@lru_cache(maxsize=256)
def _boxes_by_coordinate(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[tuple[int, ...], tuple[Box, ...]]:
    return {
        coordinate: tuple(
            held.box for held in local_boxes(shape, mesh_shape, coordinate, placements)
        )
        for coordinate in _coordinates(mesh_shape)
        if is_first_replica(coordinate, placements)
    }


def _runs(stored: StoredTensor, box: Box) -> Runs:
    return runs_of(stored.shape, box, stored.itemsize, stored.offset)


def _slabs(
    stored: StoredTensor, holders: list[_Holder], mesh_ranks: tuple[int, ...]
) -> list[_Slab]:
    """Divide a tensor's bytes so that ranks write near what they hold, on page boundaries."""
    starts = {h.rank: int(h.boxes[0].offsets[0]) for h in holders if h.boxes}
    order = sorted(mesh_ranks, key=lambda rank: (starts.get(rank, stored.offset), rank))
    shares = page_shares(stored, len(order))
    return [_Slab(rank, start, stop) for rank, (start, stop) in zip(order, shares, strict=True)]


def page_shares(stored: StoredTensor, count: int) -> list[tuple[int, int]]:
    """Divide a tensor's bytes in the file about equally, on page boundaries."""
    end = stored.offset + stored.nbytes
    cuts = [stored.offset]
    for index in range(1, count):
        cut = stored.offset + stored.nbytes * index // count
        cuts.append(min(end, -(-cut // _PAGE_NBYTES) * _PAGE_NBYTES))
    cuts.append(end)
    return list(itertools.pairwise(cuts))


def _packed(source: torch.Tensor) -> memoryview:
    view = flat_bytes(source)
    if view is None:
        view = flat_bytes(source.resolve_conj().resolve_neg().to("cpu").contiguous())
    assert view is not None
    return view


def _outgoing(
    slabs: list[_Slab],
    boxes: tuple[Runs, ...],
    packed: list[memoryview],
    number: int,
    num_ranks: int,
) -> list[list[memoryview]]:
    """Return what goes to each rank in a round."""
    outgoing: list[list[memoryview]] = [[] for _ in range(num_ranks)]
    for slab in slabs:
        start, stop = slab.round(number)
        for runs, content in zip(boxes, packed, strict=True):
            lower, upper = runs.bytes_before(start), runs.bytes_before(stop)
            if lower < upper:
                outgoing[slab.rank].append(content[lower:upper])
    return outgoing


def _incoming_counts(holders: list[_Holder], start: int, stop: int, num_ranks: int) -> list[int]:
    counts = [0] * num_ranks
    for holder in holders:
        counts[holder.rank] = sum(
            runs.bytes_before(stop) - runs.bytes_before(start) for runs in holder.boxes
        )
    return counts


def _exchange(
    sent: list[list[memoryview]], counts: list[int], ranks: Ranks, scratch: Scratch
) -> Bytes:
    lengths = [sum(map(len, pieces)) for pieces in sent]
    outgoing = scratch.take("outgoing", sum(lengths))
    position = 0
    for piece in (piece for pieces in sent for piece in pieces):
        outgoing[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)
    incoming = scratch.take("incoming", sum(counts))
    dist.all_to_all_single(
        torch.from_numpy(incoming), torch.from_numpy(outgoing), counts, lengths, group=ranks.group
    )
    return incoming


def _assembled(
    holders: list[_Holder], received: Bytes, counts: list[int], start: int, slab: Bytes
) -> memoryview:
    """Put ``slab``, the bytes of the file from ``start`` on, together from all holders."""
    stop = start + len(slab)
    firsts = np.cumsum([0, *counts])
    for holder in holders:
        position = int(firsts[holder.rank])
        for runs in holder.boxes:
            lower, upper = runs.bytes_before(start), runs.bytes_before(stop)
            runs.scatter(received[position : position + upper - lower], lower, slab, start)
            position += upper - lower
    return memoryview(slab)  # pyright: ignore[reportArgumentType]: see flat_bytes
