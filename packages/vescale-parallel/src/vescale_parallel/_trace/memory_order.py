"""In which order the dims of a tensor follow each other in memory, and those of its whole.

Random numbers are drawn in the order of memory. That of a rank's part does not always tell that
of the whole: a dim of length 1 can be anywhere, and what ranks sent each other may lie otherwise
than what one device computed. So it is noted where a model is run whole to see.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

Order = tuple[int, ...]


def memory_order(tensor: Tensor) -> Order:
    """Return the dims that are longer than 1, the outermost in memory first."""
    longer = (dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1)
    return tuple(sorted(longer, key=lambda dim: (-tensor.stride(dim), dim)))


@dataclass(frozen=True)
class NotedOrder:
    """The order of one tensor where a model was run to see, of a few rows.

    Attributes:
        whole: On one device.
        part: On a tensor-parallel rank.
    """

    whole: Order
    part: Order

    @property
    def is_kept(self) -> bool:
        """Whether what lies on a rank lies as it does on one device."""
        return _agree(self.whole, self.part)


def order_in_whole(local: Tensor, noted: NotedOrder | None, cut: Collection[int]) -> Order:
    """Return the order of the whole of which a tensor is a rank's part.

    ``noted`` is what was seen; ``cut`` dims are longer in the whole.

    Raises:
        NotImplementedError: If it cannot be told.
    """
    here = memory_order(local)
    if noted is not None and _agree(here, noted.part) and {*here} <= {*noted.whole}:
        here = noted.whole
    # Otherwise the operators here lay tensors out in another way than where it was noted.
    if not {*cut} <= {*here}:
        raise NotImplementedError("a part of length 1 does not tell where in memory its dim is")
    return here


def split_in_order(order: Order, dim: int) -> Order:
    """Return an order in which a dim is two, which follow each other."""
    found: list[int] = []
    for each in order:
        found += [dim, dim + 1] if each == dim else [each + (each > dim)]
    return tuple(found)


def strides_in_order(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, whose other dims are of length 1."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _agree(one: Order, other: Order) -> bool:
    """Whether the dims that are in both follow each other alike."""
    both = {*one} & {*other}
    return [dim for dim in one if dim in both] == [dim for dim in other if dim in both]
