"""Two-phase reads: one rank reads a block and sends the others what they need of it.

[Note: rounds]
Every rank tells the readers of its blocks, once, where its read items lie; from then on both sides
compute what has to be sent, and nothing but the bytes themselves is. Readers go through their
blocks in step, a slice a turn. As many turns as fit into bounded memory on every rank make a
round, which is one all-to-all; while it is under way the blocks of the next round are read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._comm.transfers import Transfer, exchange
from vescale_ckpt._format.blocks import BlockIndex, Integers
from vescale_ckpt._format.byte_ranges import ByteRanges, Bytes
from vescale_ckpt._io.buffer_pool import Scratch, pages

from .read_assignment import ReadAssignment
from .read_items import ReadItem

# What a rank sends, and what it receives, in a round.
_ROUND_NBYTES = 4 << 20
# Blocks that a rank reads for a round.
_ROUND_BLOCKS = 5

ReadBlock = Callable[[int, Bytes], None]


class _Asked(NamedTuple):
    """A read item that another rank needs."""

    peer: int
    file: str
    ranges: ByteRanges


class Schedule:
    """Which slice of which block is whose turn; the same on every rank.

    Attributes:
        own: The blocks that this rank reads, in the order of their turns.
        num_turns: Number of turns.
        slices: Number of slices of a block, one a turn.
    """

    def __init__(
        self, readers: ReadAssignment, block_index: BlockIndex, rank: int, size: int
    ) -> None:
        self._rank = rank
        self._readers = readers
        self._block_index = block_index
        # In a turn every rank may send all others a slice.
        nbytes = block_index.block_nbytes
        while nbytes * size > _ROUND_NBYTES and nbytes % 2 == 0:
            nbytes //= 2
        self._slice_nbytes = nbytes
        self.slices = block_index.block_nbytes // nbytes
        shared = np.flatnonzero(readers.is_shared)
        # A block's place among those of its reader: sorted by reader, counted from its first one.
        self._position = np.full(block_index.count, -1, np.int64)
        counts = np.bincount(readers.reader[shared], minlength=size)
        order = shared[np.argsort(readers.reader[shared], kind="stable")]
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        self._position[order] = np.arange(len(order)) - firsts
        self.own: list[int] = shared[readers.reader[shared] == rank].tolist()
        self.num_turns = int(counts.max(initial=0)) * self.slices

    def blocks_of(self, file: str, ranges: ByteRanges, *, own: bool) -> list[int]:
        """Return the shared blocks of ``ranges`` that this rank reads, or all the others."""
        start, stop = self._block_index.span(file, ranges)
        wanted = self._readers.is_shared[start:stop]
        wanted = wanted & ((self._readers.reader[start:stop] == self._rank) == own)
        return (np.flatnonzero(wanted) + start).tolist()

    def reader(self, block: int) -> int:
        """Return who reads a block."""
        return int(self._readers.reader[block])

    def start(self, file: str, block: int) -> int:
        """Return where in its file a block starts."""
        return self._block_index.start(file, block)

    def transfers(
        self, file: str, ranges: ByteRanges, blocks: Iterable[int], item: int, peer: int | None
    ) -> Iterator[Transfer]:
        """Yield what goes through the network of a read item in some of its blocks.

        The peer of every block is its reader if ``peer`` is None.
        """
        for block in blocks:
            turn = int(self._position[block]) * self.slices
            edge = self._block_index.start(file, block)
            lower = ranges.bytes_before(edge)
            other = self.reader(block) if peer is None else peer
            for number in range(self.slices):
                edge += self._slice_nbytes
                upper = ranges.bytes_before(edge)
                if lower < upper:
                    yield Transfer(turn + number, other, item, lower, upper)
                lower = upper


def read_in_two_phases(
    items: Sequence[ReadItem],
    readers: ReadAssignment,
    block_index: BlockIndex,
    ranks: ControlGroup,
    read: ReadBlock,
) -> None:
    """Read this rank's shared blocks and fill what others read; see [Note: rounds].

    ``read`` reads and checks a block, and fills this rank's own read items with it.

    Every rank must call this, in a block of ``ranks.together()``.

    Raises:
        CorruptCheckpointError: If a block is damaged.
    """
    schedule = Schedule(readers, block_index, ranks.rank, ranks.size)
    if not schedule.num_turns:
        return
    asked, incoming = _ask(items, schedule, block_index, ranks)
    # By turn, as is what comes in, so that a round is a slice of each.
    outgoing = sorted(
        transfer
        for index, (peer, file, ranges) in enumerate(asked)
        for transfer in schedule.transfers(
            file, ranges, schedule.blocks_of(file, ranges, own=True), index, peer
        )
    )
    rounds = _rounds(schedule, incoming, outgoing, ranks)
    window = _Window(schedule, block_index.block_nbytes, read)

    def pack(transfer: Transfer, packed: Bytes) -> None:
        _, file, ranges = asked[transfer.item]
        block = schedule.own[transfer.turn // schedule.slices]
        ranges.gather(window.content(block), schedule.start(file, block), transfer.start, packed)

    scratch = Scratch()
    with ThreadPoolExecutor(1, thread_name_prefix="vescale-ckpt-read") as pool:
        ahead = pool.submit(window.load, rounds[0], rounds[0])
        for number, turns in enumerate(rounds):
            ahead.result()
            if number + 1 < len(rounds):
                ahead = pool.submit(window.load, turns, rounds[number + 1])
            sent, expected = _of_round(outgoing, turns), _of_round(incoming, turns)
            for transfer, packed in exchange(sent, expected, pack, ranks, scratch.take):
                items[transfer.item].put(transfer.start, packed)


class _Window:
    """The blocks of the round under way and of the next one."""

    def __init__(self, schedule: Schedule, block_nbytes: int, read: ReadBlock) -> None:
        self._own = schedule.own
        self._slices = schedule.slices
        self._block_nbytes = block_nbytes
        self._read = read
        self._held: dict[int, Bytes] = {}
        self._free: list[Bytes] = []

    def load(self, current: tuple[int, int], following: tuple[int, int]) -> None:
        """Forget what is older than the ``current`` turns; read for the ``following`` ones."""
        oldest = current[0] // self._slices
        stop = -(-following[1] // self._slices)
        wanted = self._own[oldest:stop]
        for block in self._held.keys() - set(wanted):
            self._free.append(self._held.pop(block))
        for block in wanted:
            if block not in self._held:
                memory = self._free.pop() if self._free else pages(self._block_nbytes)
                self._held[block] = memory
                self._read(block, memory)

    def content(self, block: int) -> Bytes:
        """Return the bytes of a block."""
        return self._held[block]


def _ask(
    items: Sequence[ReadItem], schedule: Schedule, block_index: BlockIndex, ranks: ControlGroup
) -> tuple[list[_Asked], list[Transfer]]:
    """Tell all ranks what this one needs of their blocks; return what they ask for and send."""
    wishes: list[list[_Asked]] = [[] for _ in range(ranks.size)]
    incoming: list[Transfer] = []
    for index, item in enumerate(items):
        file, ranges = item.stored.file, item.ranges
        blocks = schedule.blocks_of(file, ranges, own=False)
        incoming += schedule.transfers(file, ranges, blocks, index, None)
        for peer in {schedule.reader(block) for block in blocks}:
            wishes[peer].append(_Asked(ranks.rank, file, ranges))
    rows = [_packed(wish, block_index) for wish in wishes]
    # How much comes from whom has to be known before there is memory for it.
    sizes = np.array([row.nbytes for row in rows], np.int64).view(np.uint8)
    counts = np.empty(ranks.size, np.int64)
    ranks.all_to_all(sizes, [8] * ranks.size, counts.view(np.uint8), [8] * ranks.size)
    received = np.empty(int(counts.sum()) // 8, np.int64)
    sent = np.concatenate(rows)
    ranks.all_to_all(
        sent.view(np.uint8), [row.nbytes for row in rows], received.view(np.uint8), counts.tolist()
    )
    parts = np.split(received, np.cumsum(counts[:-1]) // 8)
    asked = [
        wish for peer, part in enumerate(parts) for wish in _unpacked(part, block_index, peer)
    ]
    return asked, sorted(incoming)


def _packed(wishes: Sequence[_Asked], block_index: BlockIndex) -> Integers:
    """Return rows of (file, start, nbytes, counts, steps), and their width in front."""
    # Loops of one turn make all rows as wide as the one with the most loops.
    depth = max((len(ranges.counts) for _, _, ranges in wishes), default=0)
    files = {name: number for number, name in enumerate(block_index.files)}
    rows = [
        (
            files[file],
            ranges.start,
            ranges.nbytes,
            *((1,) * (depth - len(ranges.counts)) + ranges.counts),
            *((1,) * (depth - len(ranges.counts)) + ranges.steps),
        )
        for _, file, ranges in wishes
    ]
    return np.array([depth, *itertools.chain.from_iterable(rows)], np.int64)


def _unpacked(row: Integers, block_index: BlockIndex, peer: int) -> Iterator[_Asked]:
    depth = int(row[0])
    for file, start, nbytes, *loops in row[1:].reshape(-1, 3 + 2 * depth).tolist():
        ranges = ByteRanges(start, nbytes, tuple(loops[:depth]), tuple(loops[depth:]))
        yield _Asked(peer, block_index.files[file], ranges)


def _rounds(
    schedule: Schedule,
    incoming: Iterable[Transfer],
    outgoing: Iterable[Transfer],
    ranks: ControlGroup,
) -> list[tuple[int, int]]:
    """Return the first turn of each round and the one after its last."""
    loads = np.zeros((2, schedule.num_turns), np.int64)
    for load, transfers in zip(loads, (incoming, outgoing), strict=True):
        for transfer in transfers:
            load[transfer.turn] += transfer.stop - transfer.start
    # Every rank takes part in every round, so they divide by whoever has the most to do.
    ranks.reduce(loads, dist.ReduceOp.MAX)
    return divide(loads, _ROUND_NBYTES, _ROUND_BLOCKS * schedule.slices)


def divide(loads: Integers, limit: int, most: int) -> list[tuple[int, int]]:
    """Put consecutive turns together.

    ``loads`` holds, for each kind of load, its amount in each turn. The sum of each kind in a
    round is ``limit`` at most, unless a single turn has more, and so are the turns ``most``.
    """
    rounds: list[tuple[int, int]] = []
    sums, first = [0] * len(loads), 0
    for turn, amounts in enumerate(loads.T.tolist()):
        grown = [total + amount for total, amount in zip(sums, amounts, strict=True)]
        if turn > first and (max(grown) > limit or turn - first == most):
            rounds.append((first, turn))
            grown, first = amounts, turn
        sums = grown
    return [*rounds, (first, loads.shape[1])]


def _of_round(transfers: Sequence[Transfer], turns: tuple[int, int]) -> Sequence[Transfer]:
    start, stop = (bisect_left(transfers, (turn,)) for turn in turns)
    return transfers[start:stop]
