"""How the shards of many parameters share one buffer: a row for each rank.

[Note: rows] Row r of (ranks, row) has the shards of rank r: one parameter after the other, its
sharded dim first, padded to the largest shard; then a tag that tells groups of parameters apart,
repeated until the row is a multiple of 128 bytes. So what travels is aligned and in one piece,
where a shard begins is the same in every row, and packing takes as many operators for any number
of ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vescale_parallel._torch_private import foreach_copy_

# What NCCL moves fastest is aligned to this.
_ALIGNMENT = 128
# Tags are exact in every dtype of parameters, int8 included.
_NUM_TAGS = 120


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a parameter and the dim that ranks shard, None for a copy on each."""

    whole: torch.Size
    shard_dim: int | None

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a view with the sharded dim first."""
        return tensor.movedim(self.shard_dim, 0) if self.shard_dim else tensor

    def moved_back(self, tensor: Tensor) -> Tensor:
        """Return a view with the first dim where the sharded one was."""
        return tensor.movedim(0, self.shard_dim) if self.shard_dim else tensor

    @property
    def length(self) -> int:
        """The length of the dim that is sharded, 1 for a scalar."""
        return self.whole[self.shard_dim or 0] if self.whole else 1

    @property
    def rest(self) -> tuple[int, ...]:
        """The other dims, in order."""
        dim = self.shard_dim or 0
        return (*self.whole[:dim], *self.whole[dim + 1 :])

    def step(self, ranks: int) -> int:
        """Return the length of the largest shard, that of ``torch.chunk``."""
        return -(-self.length // ranks)


@dataclass(frozen=True)
class RowLayout:
    """Where the shards of parameters are in a row.

    Attributes:
        shapes: The parameters, in order.
        ranks: How many rows there are.
        itemsize: Bytes of an element.
        multiple: A row has a multiple of so many elements, so that it divides over the ranks that
            add their copies of it.
    """

    shapes: tuple[Shape, ...]
    ranks: int
    itemsize: int
    multiple: int = 1

    @functools.cached_property
    def numels(self) -> list[int]:
        """The elements of every parameter in a row, and those of the tag."""
        numels = [shape.step(self.ranks) * _numel(shape.rest) for shape in self.shapes]
        used, multiple = sum(numels), math.lcm(_ALIGNMENT // self.itemsize, self.multiple)
        return [*numels, -(-(used + 1) // multiple) * multiple - used]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The element of a row where each parameter begins, and the tag."""
        return [0, *accumulate(self.numels[:-1])]

    @property
    def row(self) -> int:
        """The elements of a row."""
        return sum(self.numels)

    def pieces_of_rows(self, rows: Tensor) -> list[list[Tensor]]:
        """Return views of what every parameter has in (ranks, row): full shards, and the rest.

        They have the shapes that :meth:`pieces_of_whole` gives a parameter.
        """
        return [
            self._pieces_of_rows(shape, start, rows)
            for shape, start in zip(self.shapes, self.starts, strict=False)
        ]

    def pieces_of_whole(self, index: int, whole: Tensor) -> list[Tensor]:
        """Return views of a whole parameter: what is in full shards, and the rest."""
        shape = self.shapes[index]
        if shape.shard_dim is None:
            return [whole]
        whole, (full, left) = shape.moved(whole), self._shards(shape)
        step, pieces = shape.step(self.ranks), list[Tensor]()
        if full:
            shards = whole[: full * step] if left else whole
            pieces.append(shards.unflatten(0, (full, step)))
        if left:
            pieces.append(whole[full * step :])
        return pieces

    def _pieces_of_rows(self, shape: Shape, start: int, rows: Tensor) -> list[Tensor]:
        if shape.shard_dim is None:
            return [rows[0, start : start + _numel(shape.whole)].view(shape.whole)]
        stride, step = _numel(shape.rest), shape.step(self.ranks)
        full, left = self._shards(shape)
        pieces: list[Tensor] = []
        if full:
            shards = rows[:full, start : start + step * stride]
            pieces.append(shards.unflatten(1, (step, *shape.rest)))
        if left:
            row = rows[full, start : start + left * stride]
            pieces.append(row.view(left, *shape.rest))
        return pieces

    def _shards(self, shape: Shape) -> tuple[int, int]:
        """Return how many ranks have a shard of full length, and the length of the next one."""
        if not shape.length:
            return 0, 0
        full = min(shape.length // shape.step(self.ranks), self.ranks)
        return full, shape.length - full * shape.step(self.ranks)

    def unpack(self, row: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return views of the shards in one row, given the shapes they have on its rank."""
        views: list[Tensor] = []
        for shape, wanted, piece in zip(
            self.shapes, shapes, row.split_with_sizes(self.numels)[:-1], strict=True
        ):
            used = piece if len(piece) == wanted.numel() else piece[: wanted.numel()]
            if shape.shard_dim:
                length = wanted[shape.shard_dim]
                views.append(shape.moved_back(used.view(length, *shape.rest)))
            else:
                views.append(used.view(wanted))
        return views


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def tag_of(number: int) -> int:
    """Return what tells the rows of a group of parameters from those of others."""
    return number % _NUM_TAGS + 1


class GatheredRows:
    """Fills whole parameters of one dtype with the shards of all ranks.

    Buffers and their views are made once; the buffers take memory only while they are in use.

    Args:
        shapes: The parameters.
        locals: This rank's shards, of any dtype.
        wholes: What is filled.
        ranks: How many ranks have shards.
        number: That of the group of parameters.

    Attributes:
        locals: Views of the shards.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        locals: Sequence[Tensor],
        wholes: Sequence[Tensor],
        ranks: int,
        number: int,
    ) -> None:
        like = wholes[0]
        layout = RowLayout(tuple(shapes), ranks, like.element_size())
        self.sent, self.rows = like.new_empty(layout.row), like.new_empty(ranks, layout.row)
        self._wholes, self.locals = list(wholes), list[Tensor]()
        freed = [whole for whole in wholes if whole.untyped_storage().size() == 0]
        for whole in freed:  # torch makes no views of tensors without memory
            allocate(whole)
        tag = like.new_full((1,), tag_of(number))
        self._into: list[tuple[Tensor, Tensor]] = [
            (self.sent[layout.starts[-1] :], tag.expand(layout.numels[-1]))
        ]
        self._out: list[tuple[Tensor, Tensor]] = []
        pieces = layout.pieces_of_rows(self.rows)
        for index, (shape, start, local, whole) in enumerate(
            zip(shapes, layout.starts, locals, wholes, strict=False)
        ):
            local = shape.moved(local)
            self.locals.append(local)
            own = self.sent[start : start + local.numel()]
            self._into.append((own.view(local.shape), local))
            whole_pieces = layout.pieces_of_whole(index, whole)
            self._out += zip(whole_pieces, pieces[index], strict=True)
        self.tags, self.expected_tags = self.rows[:, -1], tag.expand(ranks).contiguous()
        for tensor in (*freed, self.sent, self.rows):
            release(tensor)

    def pack(self) -> None:
        """Take memory, and write this rank's row into ``sent``."""
        for tensor in (*self._wholes, self.sent, self.rows):
            allocate(tensor)
        _copy(self._into)

    def unpack(self) -> None:
        """Fill the whole parameters with what arrived in ``rows``."""
        if self._out:  # all may be empty
            _copy(self._out)

    def release(self) -> None:
        """Give back the memory of the buffers."""
        release(self.sent)
        release(self.rows)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def allocate(tensor: Tensor) -> None:
    """Give a tensor whose memory was released new memory."""
    storage = tensor.untyped_storage()
    if storage.size() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())


def release(tensor: Tensor) -> None:
    """Give back the memory of a tensor; views of it stay valid once it has memory again."""
    tensor.untyped_storage().resize_(0)
