"""What is known, before a model runs, of the random numbers that its modules draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._cross_replica.context.draws import SlicedDraw
from vescale_parallel._tensor_parallel.chunks import Parts, parts_of
from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import NotedOrder


@dataclass(frozen=True, kw_only=True)
class ShardedDraw:
    """Which dims of a drawn tensor ranks hold parts of.

    Attributes:
        rows: Dim that the batch is along; None if the tensor has no batch.
        part: Dim that tensor-parallel ranks hold parts of; None if they hold the whole.
        blocks: That that dim is divided into, of each of which a rank has a part.
        inner: Whether the rows are innermost in a dim that they share with something else, as
            in (time x rows); if not, they are outermost.
        alone: Whether they shared it with nothing in the call that was run to see.
        order: In which order dims lie in memory; None if it was not seen, or not alike.
            Cuts are compared without it.
        extents: What of the sequence, or of heads, a rank has of those that share sequences,
            by dim.
        of_values: Whether its shape is as values are: of rows that a router picks, for example.
    """

    rows: int | None = None
    part: int | None = None
    blocks: Parts = 1
    inner: bool = False
    alone: bool = False
    order: NotedOrder | None = field(default=None, compare=False)
    extents: Mapping[int, Extent] = field(default_factory=dict[int, Extent], compare=False)
    of_values: bool = False


def part_of_draw(placement: Shard | InterleavedShard | None) -> dict[str, Any]:
    """Return how a draw is cut, as fields of :class:`ShardedDraw`."""
    if placement is None:
        return {}
    return {"part": placement.dim, "blocks": parts_of(placement)}


def common(one: ShardedDraw | None, other: ShardedDraw | None) -> ShardedDraw | None:
    """Return what is known of two draws alike."""
    if any(each is not None and each.of_values for each in (one, other)):
        return ShardedDraw(of_values=True)
    if one is None or other is None or one != other:
        return None
    return one if one.order == other.order else replace(one, order=None)


def in_slices(cut: ShardedDraw | None, sliced: SlicedDraw | None) -> ShardedDraw | None:
    """Return how a draw is cut of which ranks that share sequences have parts, too."""
    if cut is None or sliced is None:
        return cut
    order = cut.order if cut.order is not None and not cut.order.is_kept else sliced.order
    part = None if sliced.of_slice else cut.part
    return replace(cut, extents=sliced.extents, order=order, part=part)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is known about the draws of one module, in order within one call.

    Attributes:
        cuts: One for each; None for one that nothing is known about.
        parts: How tensor-parallel ranks hold parts, by the number of the draw, where nothing else
            is known.
        is_region: Whether draws that are not in ``cuts`` may be of cut activations.
        is_apart: Whether it, and what is in it, draws from a stream of this rank's own.
    """

    cuts: Sequence[ShardedDraw | None] = ()
    parts: Mapping[int, Shard | InterleavedShard]
    is_region: bool = False
    is_apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank is among those that share a batch and those that share a layer."""

    num_parts_of_batch: int
    part_of_batch: int
    tp_size: int
    tp_rank: int

    @staticmethod
    def alone() -> Place:
        """Return that of a rank that shares neither."""
        return Place(num_parts_of_batch=1, part_of_batch=0, tp_size=1, tp_rank=0)


@dataclass(kw_only=True)
class KnownDraws:
    """What is known of the draws of one form of call.

    Attributes:
        scopes: By the module that draws, none if the call draws nothing; None if not known, up
            to a call that drew nothing.
        otherwise: Returns what to go by where it is not known, or turned out otherwise.
    """

    scopes: Mapping[str, Scope] | None
    otherwise: Callable[[], Mapping[str, Scope]]


def mark(fqn: str, index: int) -> str:
    """Return the name that a sharding plan has for a draw of a module."""
    return f"{fqn}.<random:{index}>".lstrip(".")


@dataclass(frozen=True)
class CallDraws:
    """The call that runs: its modules that may draw, and how many rows this rank has."""

    scopes: Mapping[str, Scope]
    num_rows: int


@dataclass(eq=False)
class ModuleDraws:
    """What a module draws in the call that runs; None for nothing."""

    scope: Scope | None = None
