"""Two-phase writes: ranks exchange shards first, then each writes consecutive bytes.

[Note: two-phase write]
A tensor sharded along its columns reaches the file in pieces of a fraction of a row. Instead of
writing those, the ranks of the tensor's mesh divide its bytes into one consecutive file domain
each (ROMIO's word) and send one another what belongs there; the network is faster than short
writes. Which bytes go where follows from the placements, so nothing but the bytes themselves is
sent. The packed bytes of a box are in the order of the file, so what a domain needs of a box is
one stretch of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from torch.distributed.tensor import Placement, Shard

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._comm.transfers import Transfer, exchange, transfers_of
from vescale_ckpt._format.byte_ranges import ByteRanges, Bytes, byte_ranges_of
from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.file_layout import StoredTensor, nbytes_of
from vescale_ckpt._io.buffer_pool import Scratch
from vescale_ckpt._io.direct_io import PAGE_NBYTES
from vescale_ckpt._io.file_writer import FileWriter
from vescale_ckpt._io.tensor_bytes import packed_bytes
from vescale_ckpt._state.local_shards import LocalShard, ShardLayout, is_first_replica
from vescale_dtensor import Box, InterleavedShard, local_boxes

MIN_RANGE_NBYTES = 256 << 10
_MIN_TENSOR_NBYTES = 1 << 20
_MAX_RANKS = 256
# What a rank writes of an exchange, about as much as it sends and receives.
_ROUND_NBYTES = 4 << 20

# A box, which of its packed bytes comes first, and the bytes.
_Received = tuple[ByteRanges, int, Bytes]


@dataclass(frozen=True, slots=True)
class _FileDomain:
    """Consecutive bytes of the file that one rank writes."""

    rank: int
    start: int
    stop: int

    def part(self, number: int) -> tuple[int, int]:
        """Return the bytes of the domain that are exchanged in one go; perhaps none."""
        start = min(self.start + number * _ROUND_NBYTES, self.stop)
        return start, min(start + _ROUND_NBYTES, self.stop)


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """A tensor to exchange, seen from one rank.

    Attributes:
        holders: Where the bytes go in the file of the boxes that each rank holds.
        domains: Who writes what.
        own_domain: What this rank writes; perhaps nothing.
        own_boxes: Where the boxes go that this rank sends; none for a copy.
        packed: The bytes of these boxes.
    """

    holders: dict[int, tuple[ByteRanges, ...]]
    domains: list[_FileDomain]
    own_domain: _FileDomain
    own_boxes: tuple[ByteRanges, ...]
    packed: list[memoryview]


def needs_two_phase(shard: LocalShard) -> bool:
    """Return whether a tensor's shards are better exchanged; the same answer on every rank."""
    return _needs_two_phase(shard.layout, shard.shape, shard.dtype)


# As many tensors are alike, most of the work has been done before.
@lru_cache(maxsize=4096)
def _needs_two_phase(layout: ShardLayout, shape: tuple[int, ...], dtype: str) -> bool:
    if layout.mesh_ranks is None or not 1 < len(layout.mesh_ranks) <= _MAX_RANKS:
        return False
    if nbytes_of(dtype, shape) < _MIN_TENSOR_NBYTES:
        return False
    if not any(_cuts_rows(placement) for placement in layout.placements):
        return False
    box = next(boxes[0] for boxes in boxes_by_rank(layout, shape).values() if boxes)
    ranges = byte_ranges_of(shape, box, DTYPES[dtype].itemsize)
    return ranges.num_ranges > 1 and ranges.nbytes < MIN_RANGE_NBYTES


def _cuts_rows(placement: Placement) -> bool:
    if isinstance(placement, Shard | InterleavedShard):
        return placement.dim > 0 or isinstance(placement, InterleavedShard)
    return False


def write_in_two_phases(
    writer: FileWriter,
    tensors: Iterable[tuple[StoredTensor, LocalShard]],
    ranks: ControlGroup,
    scratch: Scratch,
) -> None:
    """Exchange the bytes of tensors and write this rank's file domains. Every rank calls this."""
    for batch in _batches(tensors, ranks.rank):
        boxes: list[list[_Received]] = [[] for _ in batch]
        outgoing = [
            transfer
            for turn, (tensor, number) in enumerate(batch)
            for domain in tensor.domains
            for transfer in transfers_of(turn, domain.rank, tensor.own_boxes, *domain.part(number))
        ]
        incoming = [
            transfer
            for turn, (tensor, number) in enumerate(batch)
            for rank, held in tensor.holders.items()
            for transfer in transfers_of(turn, rank, held, *tensor.own_domain.part(number))
        ]
        pack = partial(_pack, batch)
        for transfer, content in exchange(outgoing, incoming, pack, ranks, scratch.take):
            ranges = batch[transfer.turn][0].holders[transfer.peer][transfer.item]
            boxes[transfer.turn].append((ranges, transfer.start, content))
        for (tensor, number), received in zip(batch, boxes, strict=True):
            start, stop = tensor.own_domain.part(number)
            if start < stop:
                writer.write_from(start, stop - start, partial(_assemble, received))


def _batches(
    tensors: Iterable[tuple[StoredTensor, LocalShard]], rank: int
) -> Iterator[list[tuple[_Exchanged, int]]]:
    """Yield parts of file domains, of one tensor or several, that are exchanged together."""
    batch: list[tuple[_Exchanged, int]] = []
    filled = 0
    for stored, shard in tensors:
        tensor = _seen_from(rank, stored, shard)
        # Of the longest domain, as all ranks must agree on the batches.
        longest = max(domain.stop - domain.start for domain in tensor.domains)
        for number in range(-(-longest // _ROUND_NBYTES)):
            nbytes = min(_ROUND_NBYTES, longest - number * _ROUND_NBYTES)
            if batch and filled + nbytes > _ROUND_NBYTES:
                yield batch
                batch, filled = [], 0
            batch.append((tensor, number))
            filled += nbytes
    if batch:
        yield batch


def _seen_from(rank: int, stored: StoredTensor, shard: LocalShard) -> _Exchanged:
    assert shard.layout.mesh_ranks is not None
    holders = {
        holder: tuple(_ranges_in(stored, box) for box in boxes)
        for holder, boxes in boxes_by_rank(shard.layout, shard.shape).items()
    }
    domains = _file_domains(stored, holders, shard.layout.mesh_ranks)
    nothing = _FileDomain(rank, stored.offset, stored.offset)
    own_boxes = holders.get(rank, ())
    return _Exchanged(
        holders=holders,
        domains=domains,
        own_domain=next((domain for domain in domains if domain.rank == rank), nothing),
        own_boxes=own_boxes,
        packed=[packed_bytes(held.of(shard.local)) for held in shard.boxes] if own_boxes else [],
    )


def boxes_by_rank(layout: ShardLayout, shape: tuple[int, ...]) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of the first replicas of a distributed tensor."""
    assert layout.mesh_ranks is not None
    boxes = _boxes_by_coordinate(shape, layout.mesh_shape, layout.placements)
    return {
        rank: boxes[coordinate]
        for rank, coordinate in zip(
            layout.mesh_ranks, _coordinates(layout.mesh_shape), strict=True
        )
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


def _ranges_in(stored: StoredTensor, box: Box) -> ByteRanges:
    return byte_ranges_of(stored.shape, box, stored.itemsize, stored.offset)


def _file_domains(
    stored: StoredTensor,
    holders: Mapping[int, tuple[ByteRanges, ...]],
    mesh_ranks: tuple[int, ...],
) -> list[_FileDomain]:
    """Divide a tensor's bytes so that ranks write near what they hold, on page boundaries."""
    # In the order in which their boxes start, ranks keep most of what they hold.
    starts = {rank: boxes[0].start for rank, boxes in holders.items() if boxes}
    order = sorted(mesh_ranks, key=lambda rank: (starts.get(rank, stored.offset), rank))
    shares = page_shares(stored, len(order))
    return [
        _FileDomain(rank, start, stop) for rank, (start, stop) in zip(order, shares, strict=True)
    ]


def page_shares(stored: StoredTensor, count: int) -> list[tuple[int, int]]:
    """Divide a tensor's bytes in the file about equally, on page boundaries."""
    end = stored.offset + stored.nbytes
    cuts = [stored.offset]
    for index in range(1, count):
        cut = stored.offset + stored.nbytes * index // count
        cuts.append(min(end, -(-cut // PAGE_NBYTES) * PAGE_NBYTES))
    cuts.append(end)
    return list(itertools.pairwise(cuts))


def _pack(batch: Sequence[tuple[_Exchanged, int]], transfer: Transfer, memory: Bytes) -> None:
    packed = batch[transfer.turn][0].packed[transfer.item]
    memory[:] = np.frombuffer(packed[transfer.start : transfer.stop], np.uint8)


def _assemble(boxes: Sequence[_Received], start: int, memory: Bytes) -> None:
    """Put consecutive bytes of the file together, from ``start`` on."""
    for ranges, first, packed in boxes:
        lower, upper = ranges.bytes_before(start), ranges.bytes_before(start + len(memory))
        ranges.scatter(packed[lower - first : upper - first], lower, memory, start)
