"""What ranks have of a dim: the chunks of torch.chunk, of all of it or of each of its parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard

# Of a dim that is made of parts: how many equal ones, or the length of each.
Parts = int | tuple[int, ...]


def part_sizes(length: int, num_parts: int) -> list[int]:
    """Return the lengths of the chunks that ``torch.chunk`` makes, empty ones included."""
    step = -(-length // num_parts)
    return [max(0, min(step, length - rank * step)) for rank in range(num_parts)]


def shard_of_parts(dim: int, parts: Parts) -> Placement:
    """Return the placement that shards each of the parts that a dim is made of."""
    return Shard(dim) if parts == 1 else InterleavedShard(dim, parts)


def number_or_lengths(lengths: Sequence[int]) -> Parts:
    """Return parts by their number if they are of one length."""
    return len(lengths) if len(set(lengths)) == 1 else tuple(lengths)


def parts_of(placement: Placement) -> Parts:
    """Return the parts of a dim that are sharded, each on its own."""
    return placement.parts if isinstance(placement, InterleavedShard) else 1


def lengths_within(parts: Parts, length: int) -> list[int]:
    """Return the lengths of parts of what is ``length`` long: a dim, a shard of it, or a chunk."""
    if isinstance(parts, tuple):
        return [part * length // sum(parts) for part in parts]
    return [length // parts] * parts
