"""Where in what one device draws that of a rank is: integers and views only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Generator, Tensor
from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor import Box, LocalBox, local_boxes
from vescale_dtensor.random import Fill, Window, draw_part
from vescale_parallel._tensor_parallel.chunks import Parts, part_sizes, shard_of_parts
from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import order_in_whole, split_in_order, strides_in_order

from .known_draws import Place, ShardedDraw


@dataclass(frozen=True)
class Part:
    """A view of what a rank draws, shape and strides of the whole, and where in it that is."""

    here: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    boxes: tuple[LocalBox, ...]

    def draw(self, fill: Fill, generator: Generator | None = None) -> None:
        """Draw this part of the whole."""
        window = Window(self.shape, self.strides, 0, self.here.dtype)
        draw_part(fill, window=window, boxes=self.boxes, out=self.here, generator=generator)


@dataclass(frozen=True)
class DrawsOfRank:
    """Which parts a rank draws, in one call of a model.

    Attributes:
        place: Where the rank is.
        num_rows: How many rows of the batch it has.
        length: Of the sequence that tensor-parallel ranks have parts of; 0 if they have none.
    """

    place: Place
    num_rows: int
    length: int

    def cut_dims(self, cut: ShardedDraw) -> tuple[int | None, int | None]:
        """Return the dims of the rows and of the part, None for what is not cut here."""
        return (
            cut.rows if self.place.num_parts_of_batch > 1 else None,
            cut.part if self.place.tp_size > 1 else None,
        )

    def part(self, out: Tensor, cut: ShardedDraw) -> Part:
        """Return which part of a whole ``out`` is.

        Raises:
            NotImplementedError: If it cannot be told.
        """
        (rows, part), extents = self.cut_dims(cut), cut.extents
        dims = {dim for dim in (rows, part, *extents) if dim is not None}
        order = order_in_whole(out, cut.order, dims)
        if rows is not None and (cut.inner or rows == part):
            order = split_in_order(order, rows)
            if rows in extents:
                raise NotImplementedError("rows share their dim with the sequence, or heads")
            extents = {dim + (dim > rows): each for dim, each in extents.items()}
            out, rows, part = self._apart(out, rows, part, inner=cut.inner)
        place = self.place
        shape = [extents[d].length if d in extents else n for d, n in enumerate(out.shape)]
        if rows is not None:
            shape[rows] *= place.num_parts_of_batch
        if part is not None:
            shape[part] = self._whole_length(shape, part)
            if not _divides(shape[part], cut.blocks, place.tp_size):
                raise NotImplementedError("a dim is no multiple of its blocks")
        boxes = local_boxes(
            shape,
            (place.num_parts_of_batch, place.tp_size),
            (place.part_of_batch, place.tp_rank),
            (_placement(rows), _placement(part, cut.blocks)),
        )
        if extents:
            boxes = tuple(each for held in boxes for each in _in_extents(held, extents))
        return Part(out, tuple(shape), strides_in_order(shape, order), boxes)

    def _apart(
        self, out: Tensor, rows: int, part: int | None, *, inner: bool
    ) -> tuple[Tensor, int, int | None]:
        """View a dim that rows share with something else as two; return where what is then."""
        num_rows = self.num_rows
        if not num_rows or out.shape[rows] % num_rows:
            raise NotImplementedError("a dim is no multiple of the rows of the batch")
        if not inner:
            # Rows of what is cut in each of them: (batch * heads, ...).
            return out.unflatten(rows, (num_rows, -1)), rows, rows + 1
        if part is not None and part > rows:
            part += 1
        return out.unflatten(rows, (-1, num_rows)), rows + 1, part

    def _whole_length(self, shape: Sequence[int], dim: int) -> int:
        """Return how long a dim is that tensor-parallel ranks have parts of."""
        size, rank = self.place.tp_size, self.place.tp_rank
        others = (*shape[:dim], *shape[dim + 1 :])
        # What is cut by heads or features divides evenly, and has the whole sequence.
        is_sequence = self.length and part_sizes(self.length, size)[rank] == shape[dim]
        return self.length if is_sequence and self.length not in others else shape[dim] * size


def _in_extents(held: LocalBox, extents: Mapping[int, Extent]) -> Iterator[LocalBox]:
    """Return what of a box, held by ranks that have all of each dim, is in a rank's parts."""
    pieces: list[list[tuple[int, int, int]]] = []
    for dim, (at, length) in enumerate(zip(held.local_offset, held.box.shape, strict=True)):
        cut = [(at, 0, length)]  # where it begins on the rank; where it does and ends in the box
        if dim in extents:
            cut = [
                (here + max(at - first, 0), max(first - at, 0), min(end - at, length))
                for here, first, end in extents[dim].pieces()
            ]
        pieces.append([each for each in cut if each[1] < each[2]])
    for of_dims in itertools.product(*pieces):
        offset = (o + first for o, (_, first, _) in zip(held.box.offset, of_dims, strict=True))
        shape = (end - first for _, first, end in of_dims)
        yield LocalBox(Box(tuple(offset), tuple(shape)), tuple(here for here, *_ in of_dims))


def _divides(length: int, blocks: Parts, num_ranks: int) -> bool:
    if isinstance(blocks, tuple):
        return sum(blocks) == length and not any(each % num_ranks for each in blocks)
    return blocks == 1 or length % (blocks * num_ranks) == 0


def _placement(dim: int | None, blocks: Parts = 1) -> Placement:
    return Replicate() if dim is None else shard_of_parts(dim, blocks)
