"""What is known, before a model runs, of the random numbers that its modules draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import NotedOrder


@dataclass(frozen=True, kw_only=True)
class ShardedDraw:
    """Which dims of a drawn tensor ranks hold parts of.

    Attributes:
        rows: Dim that the batch is along; None if the tensor has no batch.
        part: Dim that tensor-parallel ranks hold parts of; None if they hold the whole.
        inner: Whether the rows are innermost in a dim that they share with something else, as
            in (time x rows); if not, they are outermost.
        alone: Whether they shared it with nothing in the call that was run to see.
        order: In which order dims lie in memory; None if it was not seen, or not alike.
            Cuts are compared without it.
        extents: What of the sequence, or of heads, a rank has of those that share sequences,
            by dim.
    """

    rows: int | None = None
    part: int | None = None
    inner: bool = False
    alone: bool = False
    order: NotedOrder | None = field(default=None, compare=False)
    extents: Mapping[int, Extent] = field(default_factory=dict[int, Extent], compare=False)


def common(one: ShardedDraw | None, other: ShardedDraw | None) -> ShardedDraw | None:
    """Return what is known of two draws alike."""
    if one is None or other is None or one != other:
        return None
    return one if one.order == other.order else replace(one, order=None)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is known about the draws of one module, in order within one call.

    Attributes:
        cuts: One for each; None for one that nothing is known about.
        parts: Dims that tensor-parallel ranks hold parts of, by the number of the draw, where
            nothing else is known.
        is_region: Whether draws that are not in ``cuts`` may be of cut activations.
    """

    cuts: Sequence[ShardedDraw | None] = ()
    parts: Mapping[int, int]
    is_region: bool = False


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
