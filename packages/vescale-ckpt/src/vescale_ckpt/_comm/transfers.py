"""Transfers: what ranks send one another in the all-to-all of a two-phase read or write.

[Note: transfers]
Both sides compute the same transfers, so nothing but their bytes is sent: to each rank, in the
order of turns and items. Whoever reads or writes decides which transfers make a round, and thereby
how much memory one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from vescale_ckpt._format.byte_ranges import ByteRanges, Bytes

from .control_group import ControlGroup


class Transfer(NamedTuple):
    """Some packed bytes of one box that go from one rank to another.

    Attributes:
        turn: When, counted alike on both sides.
        peer: The other rank.
        item: Which box; both sides number them in the same order.
        start: First byte of the packed box.
        stop: The byte after the last.
    """

    turn: int
    peer: int
    item: int
    start: int
    stop: int


def transfers_of(
    turn: int, peer: int, boxes: Iterable[ByteRanges], start: int, stop: int
) -> Iterator[Transfer]:
    """Yield the transfers of what of some boxes lies between two places in the file."""
    for item, ranges in enumerate(boxes):
        lower, upper = ranges.bytes_before(start), ranges.bytes_before(stop)
        if lower < upper:
            yield Transfer(turn, peer, item, lower, upper)


def exchange(
    outgoing: Iterable[Transfer],
    incoming: Iterable[Transfer],
    pack: Callable[[Transfer, Bytes], None],
    ranks: ControlGroup,
    take: Callable[[str, int], Bytes],
) -> Iterator[tuple[Transfer, Bytes]]:
    """Send and receive bytes; see [Note: transfers]. Every rank must call and exhaust this.

    ``pack`` is called with what to send and the memory to put it into, ``take`` returns memory by
    a name and a length. What has come is yielded with its bytes.
    """
    # An all-to-all takes what goes to a rank, and leaves what comes from one, in one piece.
    in_order = attrgetter("peer", "turn", "item")
    sent, expected = sorted(outgoing, key=in_order), sorted(incoming, key=in_order)
    to_each, from_each = _by_peer(sent, ranks.size), _by_peer(expected, ranks.size)
    content, received = take("outgoing", sum(to_each)), take("incoming", sum(from_each))
    for transfer, memory in _places(sent, content):
        pack(transfer, memory)
    ranks.all_to_all(content, to_each, received, from_each)
    yield from _places(expected, received)


def _by_peer(transfers: Iterable[Transfer], size: int) -> list[int]:
    counts = [0] * size
    for transfer in transfers:
        counts[transfer.peer] += transfer.stop - transfer.start
    return counts


def _places(transfers: Iterable[Transfer], memory: Bytes) -> Iterator[tuple[Transfer, Bytes]]:
    """Yield transfers with their share of the memory that travels."""
    position = 0
    for transfer in transfers:
        stop = position + transfer.stop - transfer.start
        yield transfer, memory[position:stop]
        position = stop
