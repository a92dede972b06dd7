"""Copy checkpoints one tensor after the other, in one process and in bounded memory.

What is read is checked block by block, each block once; what is written is written from the
first byte of a file to its last.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from vescale_ckpt._format.blocks import Blocks
from vescale_ckpt._format.byte_ranges import byte_ranges_of, within
from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.file_layout import MAX_FILE_NBYTES, StoredTensor, TensorInfo, plan_files
from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._format.state_tree import Json
from vescale_ckpt._io.object_store import local_path
from vescale_ckpt._io.sequential_writer import (
    BLOCK_NBYTES,
    Progress,
    no_progress,
    write_files_in_order,
)
from vescale_ckpt._io.tensor_bytes import flat_bytes
from vescale_ckpt._store.directory_storage import DirectoryStorage
from vescale_ckpt._store.reader import CheckpointReader
from vescale_dtensor import Box

_MAX_KEPT_BLOCKS = 32


class Source(Protocol):
    """A checkpoint of some format, to be copied.

    Attributes:
        tree: The state as tagged JSON.
        tensors: Its tensors by dotted key; files and offsets mean nothing to others.
        aliases: Keys whose tensor is stored under another key.
    """

    @property
    def tree(self) -> Mapping[str, Json]: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    def content(self, key: str) -> Iterable[memoryview]:
        """Yield the bytes of a tensor, row by row, a bounded number at a time."""
        ...


class FileSource:
    """A checkpoint in safetensors files, ours or HuggingFace's."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._blocks: dict[str, tuple[int, bytes]] = {}

    @property
    def tree(self) -> Mapping[str, Json]:
        return self._reader.manifest.tree

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._reader.manifest.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._reader.manifest.aliases

    def content(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, a whole number of elements each time."""
        yield from self.part(key, 0, self._reader.manifest.stored(key).nbytes)

    def part(self, key: str, first: int, last: int) -> Iterator[memoryview]:
        """Yield the bytes of a tensor from ``first`` to ``last``, counted from its start."""
        stored = self._reader.manifest.stored(key)
        for start in range(first, last, BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, last)
            if self._reader.manifest.aliases.get(key, key) in self._reader.manifest.boxes:
                yield memoryview(self._gathered(key, stored, start, stop))
            else:
                yield memoryview(self._bytes(stored.file, stored.offset + start, stop - start))

    def _gathered(self, key: str, stored: StoredTensor, first: int, last: int) -> bytes:
        """Put bytes of a tensor together whose boxes are stored here and there."""
        if not stored.shape:
            (only,) = self._reader.manifest.boxes_of(key)
            return self._bytes(only.stored.file, only.stored.offset + first, last - first)
        # Whole rows around what is asked for, as a box can be cut to those.
        row_nbytes = stored.nbytes // stored.shape[0]
        start, stop = first // row_nbytes, -(-last // row_nbytes)
        rest = stored.shape[1:]
        band = Box((start, *(0,) * len(rest)), (stop - start, *rest))
        rows = np.empty((stop - start) * row_nbytes, np.uint8)
        for box, part in self._reader.manifest.boxes_of(key):
            common = box.intersect(band)
            if common is None:
                continue
            source = byte_ranges_of(box.shape, within(common, box), part.itemsize, part.offset)
            located = source.locate(0, source.total_nbytes)
            packed = b"".join(self._bytes(part.file, at, hi - lo) for at, lo, hi in located)
            ranges = byte_ranges_of(band.shape, within(common, band), part.itemsize)
            ranges.scatter(np.frombuffer(packed, np.uint8), 0, rows, 0)
        return rows[first - start * row_nbytes : last - start * row_nbytes].tobytes()

    def _bytes(self, file: str, offset: int, nbytes: int) -> bytes:
        manifest = self._reader.manifest
        if not manifest.files[file].checksums:
            return self._reader.content(file, offset, nbytes)
        length = manifest.block_nbytes
        first, last = offset // length, (offset + nbytes - 1) // length
        joined = b"".join(self._checked(file, number) for number in range(first, last + 1))
        return joined[offset - first * length :][:nbytes]

    def _checked(self, file: str, number: int) -> bytes:
        """Return a block whose checksum is right; neighbours need it again."""
        kept = self._blocks.get(file)
        if kept is None or kept[0] != number:
            if len(self._blocks) > _MAX_KEPT_BLOCKS:
                self._blocks.clear()
            blocks = Blocks(file, number, number + 1)
            content = self._reader.read_blocks(blocks, self._reader.scratch())
            kept = self._blocks[file] = (number, content.tobytes())
        return kept[1]


def stored_in(source: Source, key: str) -> StoredTensor:
    """Return the stored tensor of a key or of what it is an alias of."""
    return source.tensors[source.aliases.get(key, key)]


def table_of(source: Source, groups: Mapping[str, tuple[str, str]]) -> list[TensorInfo]:
    """Return the tensors to lay out, given the group and the name therein of each key to take."""
    return [
        TensorInfo(key, group, name, *stored_in(source, key)[2:4])
        for key, (group, name) in groups.items()
    ]


def groups_of(tree: Mapping[str, Json], tensors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the top-level key of each tensor and its key below that, as a save names them."""
    groups: dict[str, tuple[str, str]] = {}
    for key in tensors:
        # A top-level key may contain dots: the longest that fits is it.
        tops = [key[:at] for at, char in enumerate(key) if char == "." and key[:at] in tree]
        top = tops[-1] if tops and key not in tree else ""
        groups[key] = (top, key[len(top) + 1 :]) if top else ("", key)
    return groups


def write_checkpoint_from(
    source: Source,
    path: str | os.PathLike[str],
    *,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress = no_progress,
) -> None:
    """Write and commit a checkpoint of our format with all that ``source`` has."""
    storage = DirectoryStorage(local_path(path))
    storage.check_replaceable()
    groups = groups_of(source.tree, source.tensors)
    plan = plan_files(table_of(source, groups), max_file_nbytes)
    token = uuid.uuid4().hex
    staged = storage.stage(token)
    try:
        files = storage.write(
            token, lambda create: write_files_in_order(create, plan, source.content, progress)
        )
        staged.commit(
            Manifest(
                block_nbytes=BLOCK_NBYTES,
                files=files,
                tensors=plan.tensors,
                aliases=dict(source.aliases),
                tree=dict(source.tree),
            )
        )
    finally:
        staged.close()


def converted(content: Iterable[memoryview], stored: str, wanted: str) -> Iterator[memoryview]:
    """Yield elements of the dtype ``wanted`` for whole elements of the dtype ``stored``."""
    for view in content:
        if stored == wanted or not view:
            yield view
            continue
        elements = torch.frombuffer(bytearray(view), dtype=DTYPES[stored])
        packed = flat_bytes(elements.to(DTYPES[wanted]))
        assert packed is not None
        yield packed
