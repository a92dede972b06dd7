"""Placements that training needs and torch lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeGuard

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._torch_private import StridedShard

# How two values become one.
ReduceOp = Literal["sum", "avg", "max", "min", "product"]


class _PlacementByValue(Placement):
    """A placement that is what the values named in ``__match_args__`` are."""

    __match_args__: ClassVar[tuple[str, ...]]

    def _key(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        names = type(self).__match_args__
        values = ", ".join(f"{n}={v}" for n, v in zip(names, self._key(), strict=True))
        return f"{type(self).__name__}({values})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key()


class RaggedShard(_PlacementByValue):
    """Consecutive units of a tensor dim, any number of them per rank, zero included.

    ZeRO gives every rank some rows of a parameter, and a pipeline stage is the extreme case:
    one rank holds all rows and the others none. Several consecutive dims are cut as one, in C
    order: ZeRO over flat parameters. The local tensor then has one dim in their place.

    Attributes:
        dims: The tensor dims that are cut, one or several consecutive ones, ascending.
        granularity: Indices of the (flattened) dim in one unit; the last unit may be shorter.
        local_units: Number of units of each rank of the mesh axis, in rank order.

    Example:
        >>> from vescale_dtensor import local_shape
        >>> flat = RaggedShard((0, 1), granularity=5, local_units=(1, 3))
        >>> local_shape((4, 5), mesh_shape=(2,), coordinate=(1,), placements=(flat,))
        (15,)
    """

    __match_args__ = ("dims", "granularity", "local_units")

    def __init__(
        self, dims: tuple[int, ...], granularity: int, local_units: tuple[int, ...]
    ) -> None:
        super().__init__()
        dims = tuple(dims)
        if not dims or dims[0] < 0 or dims != tuple(range(dims[0], dims[0] + len(dims))):
            raise ValueError(f"expected consecutive dims, ascending, none negative, got {dims!r}")
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
        """The tensor dim that is cut, the first one of several."""
        return self.dims[0]

    def _key(self) -> tuple[object, ...]:
        return (self.dims, self.granularity, self.local_units)


class InterleavedShard(_PlacementByValue):
    """A tensor dim made of several parts, each sharded on its own.

    A fused QKV weight is three matrices in one; every rank needs a slice of each of them. With
    grouped-query heads its parts differ in length.

    Attributes:
        dim: The tensor dim that is cut.
        parts: Number of equal parts, which must divide the dim; or the length of each part, which
            together are the dim's. Equal lengths are kept as their number. Ranks get chunks of
            each part as ``torch.chunk`` cuts it.

    Example:
        >>> from vescale_dtensor import local_shape
        >>> qkv = InterleavedShard(0, (8, 4, 4))
        >>> local_shape((16, 2), mesh_shape=(2,), coordinate=(1,), placements=(qkv,))
        (8, 2)
    """

    __match_args__ = ("dim", "parts")

    def __init__(self, dim: int, parts: int | Sequence[int]) -> None:
        super().__init__()
        lengths = (parts,) if isinstance(parts, int) else tuple(parts)
        if dim < 0 or not lengths or min(lengths) < 1:
            raise ValueError(
                "expected dim >= 0 and parts >= 1, or the length of each part, "
                f"got {dim!r} and {parts!r}"
            )
        self.dim = dim
        self.parts: int | tuple[int, ...] = lengths
        if len(set(lengths)) == 1:
            self.parts = parts if isinstance(parts, int) else len(lengths)

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the length of each part of a dim of ``length``.

        There are none of a dim of which an outer mesh axis has left nothing, as on the stages of
        a pipeline that do not have the tensor.

        Raises:
            ValueError: If the dim is not made of such parts.
        """
        if not length:
            return ()
        if isinstance(self.parts, tuple):
            if sum(self.parts) != length:
                raise ValueError(f"{self!r} needs a tensor dim of {sum(self.parts)}, got {length}")
            return self.parts
        if length % self.parts:
            raise ValueError(
                f"{self!r} needs a tensor dim that is a multiple of {self.parts}, got {length}"
            )
        return (length // self.parts,) * self.parts

    def _key(self) -> tuple[int, int | tuple[int, ...]]:
        return (self.dim, self.parts)


def is_sharded(placement: Placement) -> TypeGuard[Placement]:
    """Return whether ranks of the mesh axis hold different elements."""
    return not isinstance(placement, Replicate | Partial)


def single_dim(placement: Placement) -> int | None:
    """Return the tensor dim that a placement cuts, None if it is none or several."""
    if isinstance(placement, RaggedShard):
        return placement.dims[0] if len(placement.dims) == 1 else None
    return (
        placement.dim if isinstance(placement, Shard | StridedShard | InterleavedShard) else None
    )


def on_dim(placement: Placement, dim: int) -> Placement:
    """Return a placement that cuts ``dim`` the way ``placement`` cuts its own."""
    match placement:
        case RaggedShard(dims=_, granularity=granularity, local_units=units):
            return RaggedShard((dim,), granularity, units)
        case InterleavedShard(parts=parts):
            return InterleavedShard(dim, parts)
        case StridedShard():
            return StridedShard(dim, split_factor=placement.split_factor)
        case _:
            return Shard(dim)
