"""Placements that training needs and torch lacks."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch.distributed.tensor import Partial, Placement, Replicate


class RaggedShard(Placement):
    """Consecutive units of a tensor dim, any number of them per rank, zero included.

    ZeRO gives every rank some rows of a parameter, and a pipeline stage is the extreme case:
    one rank holds all rows and the others none.

    Attributes:
        dims: The tensor dims that are cut; ``(0,)`` is the only choice so far.
        granularity: Indices of the dim in one unit; the last unit may be shorter.
        local_units: Number of units of each rank of the mesh axis, in rank order.
    """

    __match_args__ = ("dims", "granularity", "local_units")

    def __init__(
        self, dims: tuple[int, ...], granularity: int, local_units: tuple[int, ...]
    ) -> None:
        super().__init__()
        if dims != (0,):
            raise ValueError(f"expected dims=(0,), the only dims supported, got {dims!r}")
        if granularity < 1:
            raise ValueError(f"expected a granularity of at least 1, got {granularity!r}")
        if not local_units or min(local_units) < 0 or not any(local_units):
            raise ValueError(
                f"expected one count of units per rank, none negative, some positive, "
                f"got {local_units!r}"
            )
        self.dims = dims
        self.granularity = granularity
        self.local_units = tuple(local_units)

    @property
    def dim(self) -> int:
        """The tensor dim that is cut."""
        return self.dims[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return (
            f"RaggedShard(dims={self.dims}, granularity={self.granularity}, "
            f"local_units={self.local_units})"
        )

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.dims, self.granularity, self.local_units)

    def _key(self) -> tuple[object, ...]:
        return (self.dims, self.granularity, self.local_units)


class InterleavedShard(Placement):
    """A tensor dim made of ``parts`` equal parts, each sharded on its own.

    A fused QKV weight is three matrices in one; every rank needs a slice of each of them.

    Attributes:
        dim: The tensor dim that is cut.
        parts: Number of equal parts; ``parts * num_ranks`` must divide the dim.
    """

    __match_args__ = ("dim", "parts")

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        if dim < 0 or parts < 1:
            raise ValueError(f"expected dim >= 0 and parts >= 1, got {dim!r} and {parts!r}")
        self.dim = dim
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InterleavedShard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, parts={self.parts})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return InterleavedShard, (self.dim, self.parts)

    def _key(self) -> tuple[int, int]:
        return (self.dim, self.parts)


def is_sharded(placement: Placement) -> TypeGuard[Placement]:
    """Return whether ranks of the mesh axis hold different elements."""
    return not isinstance(placement, Replicate | Partial)
