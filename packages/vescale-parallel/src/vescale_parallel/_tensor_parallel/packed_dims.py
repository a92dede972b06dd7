"""Dims of a sharded model's tensors that are made of several parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vescale_dtensor import InterleavedShard, Replicate

from .explain import Applied


@dataclass(frozen=True)
class PackedDim:
    """A dim that is made of parts, each sharded on its own or whole on every rank.

    Attributes:
        lengths: Of the parts, or how they relate.
        is_whole: Of each part, whether ranks have all of it.
    """

    lengths: tuple[int, ...]
    is_whole: tuple[bool, ...]


def packed_dims(model: nn.Module) -> frozenset[PackedDim]:
    """Return the packed dims that tensor parallelism sharded or reads in a parallelized model.

    Parts that are equally long and all sharded are not among them.
    """
    applied = getattr(model, "_vescale_sharding", None)
    if not isinstance(applied, Applied):
        return frozenset()
    placements = applied.sharding.placements
    found: set[PackedDim] = set()
    for placement in placements.values():
        lengths = _lengths(placement)
        if lengths:
            found.add(PackedDim(lengths, (False,) * len(lengths)))
    for (module, name), read in applied.sharding.spec.read_parts.items():
        if f"{module}.{name}" in placements:
            lengths = _lengths(placements[f"{module}.{name}"]) or (1,) * len(read)
            found.add(PackedDim(lengths, tuple(each == Replicate() for each in read)))
    return frozenset(found)


def _lengths(placement: object) -> tuple[int, ...]:
    """Return how long the parts are, nothing if they are equally long."""
    is_packed = isinstance(placement, InterleavedShard)
    return placement.parts if is_packed and isinstance(placement.parts, tuple) else ()
