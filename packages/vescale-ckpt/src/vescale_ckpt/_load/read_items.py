"""Read items: boxes of stored tensors, and the memory that their bytes go to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch

from vescale_ckpt._format.byte_ranges import ByteRanges, Bytes, byte_ranges_of, within
from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._format.manifest import Manifest, StoredBox
from vescale_ckpt._io.tensor_bytes import flat_bytes, parts_of
from vescale_ckpt._state.local_shards import LocalShard, located
from vescale_ckpt._store.reader import CheckpointReader
from vescale_ckpt.exceptions import MismatchError
from vescale_dtensor import LocalBox


@dataclass(eq=False)
class ReadItem:
    """A box of a stored tensor and the memory it is to be read into.

    Attributes:
        key: What the state calls the tensor.
        stored: Where the whole tensor lies.
        ranges: Where the box lies.
        target: Memory of the shape of the box, of any device, strides and dtype.
    """

    key: str
    stored: StoredTensor
    ranges: ByteRanges
    target: torch.Tensor

    @property
    def is_unaligned(self) -> bool:
        """Whether an element may lie in two blocks and has to be converted nevertheless."""
        return self.stored.offset % self.stored.itemsize != 0 and self.flat is None

    def fill_from(self, source: Bytes, base: int) -> None:
        """Take what there is of the box in consecutive bytes of the file, from ``base`` on."""
        lower = self.ranges.bytes_before(base)
        upper = self.ranges.bytes_before(base + len(source))
        if (flat := self.flat) is not None:
            self.ranges.gather(source, base, lower, flat[lower:upper])
        elif lower < upper:
            packed = np.empty(upper - lower, np.uint8)
            self.ranges.gather(source, base, lower, packed)
            self.put(lower, packed)

    @torch.no_grad()
    def put(self, start: int, packed: Bytes) -> None:
        """Put consecutive bytes of the packed box, whole elements, where they belong.

        ``start`` says which byte of the packed box the first of them is.
        """
        if (flat := self.flat) is not None:
            flat[start : start + len(packed)] = packed
            return
        itemsize = self.stored.itemsize
        if packed.ctypes.data % itemsize:
            packed = packed.copy()
        values = torch.from_numpy(packed).view(DTYPES[self.stored.dtype])
        self._check_range(values)
        position = 0
        for view in _views(self.target, start // itemsize, start // itemsize + len(values)):
            view.copy_(values[position : position + view.numel()].view(view.shape))
            position += view.numel()

    def _check_range(self, values: torch.Tensor) -> None:
        """Refuse integers that the target's dtype lacks: a conversion would wrap them around.

        Raises:
            MismatchError: With the key, the first of them and the dtype.
        """
        kinds = values.dtype, self.target.dtype
        if kinds[0] == kinds[1] or any(k.is_floating_point or k.is_complex for k in kinds):
            return
        if torch.bool in kinds:  # becomes any other, and none becomes one
            return
        info = torch.iinfo(kinds[1])
        numbers = values.numpy()
        outside = numbers[(numbers < info.min) | (numbers > info.max)]
        if len(outside):
            raise MismatchError(
                f"{self.key!r}: the checkpoint holds {outside[0]} of {kinds[0]}, which "
                f"{kinds[1]}, the dtype of the given tensor, cannot hold; give it a wider one"
            )

    @cached_property
    def flat(self) -> Bytes | None:
        """Return the memory of ``target`` if it is to hold just the bytes of the box."""
        if self.target.dtype != DTYPES[self.stored.dtype]:
            return None
        view = flat_bytes(self.target)
        return None if view is None else np.frombuffer(view, np.uint8)


def _views(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield views that make up elements ``start`` to ``stop`` in row-major order."""
    if start == stop:
        return
    if stop - start == tensor.numel():
        yield tensor
        return
    row = tensor[0].numel()
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _views(tensor[first], head, tail)
        return
    if head:
        yield from _views(tensor[first], head, row)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail:
        yield from _views(tensor[last], 0, tail)


def read_unaligned(reader: CheckpointReader, item: ReadItem) -> None:
    """Fill a read item without checking anything, whatever its alignment and memory."""
    position = 0
    for part in parts_of(item.target):
        packed = np.empty(part.numel() * item.stored.itemsize, np.uint8)
        for offset, lower, upper in item.ranges.locate(position, len(packed)):
            reader.read(item.stored.file, offset, packed[lower:upper].data)
        item.put(position, packed)
        position += len(packed)


def read_items_of(manifest: Manifest, targets: Iterable[tuple[LocalShard, str]]) -> list[ReadItem]:
    """Return what has to be read to fill this rank's shard of ``targets``, in file order."""
    items: list[ReadItem] = []
    for shard, key in targets:
        if manifest.aliases.get(key, key) in manifest.boxes:
            for held in shard.boxes:
                items += _items_from(key, manifest.boxes_of(key), held, shard.local)
            continue
        stored = manifest.stored(key)
        for memory, ranges in located(shard, stored):
            items.append(ReadItem(key, stored, ranges, memory))
    # Two sorts by plain numbers and strings are faster than one by pairs.
    items.sort(key=attrgetter("ranges.start"))
    items.sort(key=attrgetter("stored.file"))
    return items


def _items_from(
    key: str, boxes: Iterable[StoredBox], held: LocalBox, local: torch.Tensor
) -> Iterator[ReadItem]:
    """Yield what of each stored box lies in a box of this rank."""
    target = held.of(local)
    for box, stored in boxes:
        common = box.intersect(held.box)
        if common is not None and common.numel:
            ranges = byte_ranges_of(box.shape, within(common, box), stored.itemsize, stored.offset)
            yield ReadItem(key, stored, ranges, target[within(common, held.box).slices])
