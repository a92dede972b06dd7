"""Write a checkpoint as one of torch.distributed.checkpoint; see [Note: DCP and pickle]."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.state_tree import (
    Json,
    decode,
    elements_of,
    items_of,
    ranks_of,
    references,
)
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._io.sequential_writer import Progress, no_progress
from vescale_ckpt._store.open import open_checkpoint
from vescale_ckpt.exceptions import CheckpointError

from .streaming_copy import FileSource, Source, stored_in

_MAX_CHUNK_NBYTES = 32 << 20


class _Row(NamedTuple):
    """Where in a tensor the one of a rank begins, in bytes."""

    key: str
    first: int


def export_dcp(checkpoint: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write a checkpoint as one of ``torch.distributed.checkpoint``, for ``dcp.load``.

    Some 32 MB of memory are used, more if a single row is larger, and every block that is read
    is checked. Tied tensors are written under each of their keys. The result is pickle, as all
    such checkpoints are. Call this on one rank only.

    What was saved for each rank (:class:`PerRank`, :class:`RngState`), such checkpoints have no
    word for. It is written as a dict of the values of ``rank_0``, ``rank_1`` and so on; of
    values without tensors that all ranks had the same of, as ``rank_0`` alone.

    Args:
        checkpoint: A checkpoint's directory.
        directory: Where to write; it must be empty or not there.

    Raises:
        CheckpointError: If there is something in the directory.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    with open_checkpoint(checkpoint) as reader:
        write_dcp(FileSource(reader), directory)


def write_dcp(
    source: FileSource, directory: str | os.PathLike[str], progress: Progress = no_progress
) -> None:
    """Write all that any safetensors files hold as :func:`export_dcp` does."""
    target = absolute_path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty; write to another directory")
    stand = _Stand(source)
    state = {key: stand.decode(node) for key, node in source.tree.items()}
    # With nothing to copy ahead the writer takes one tensor after the other.
    writer = FileSystemWriter(target, per_thread_copy_ahead=0)
    planner = _Planner(source, stand.rows, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            shutil.rmtree(target, ignore_errors=True)
            raise next(iter(error.failures.values()))[0] from error


class _Planner(DefaultSavePlanner):
    """Lets torch's writer have the bytes of a tensor when it wants to write them."""

    def __init__(self, source: FileSource, rows: Mapping[int, _Row], progress: Progress) -> None:
        super().__init__()
        self._source = source
        self._rows = rows
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in source.tensors.values())
        self._memory = bytearray()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in _in_chunks(item)]
        self.plan = SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        row_nbytes = data.properties.dtype.itemsize
        row_nbytes *= torch.Size(data.size[1:]).numel()
        first = data.chunk.offsets[0] * row_nbytes if data.chunk.offsets else 0
        last = first + data.properties.dtype.itemsize * data.chunk.sizes.numel()
        if first == last:
            return torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="cpu")
        # torch's writer keeps every tensor of a file until the file is done, but looks at none
        # again that it has written: all can lie in the same memory.
        if len(self._memory) < last - first:
            self._memory = bytearray(last - first)
        position = 0
        key, start = write_item.index.fqn, 0
        row = self._rows.get(id(self.state_dict[key]))
        if row is not None:
            key, start = row.key, row.first
        for part in self._source.part(key, start + first, start + last):
            self._memory[position : position + len(part)] = part
            position += len(part)
        self._done += position
        # Tied tensors are written twice.
        self._progress(min(self._done, self._total), self._total)
        numel = data.chunk.sizes.numel()
        chunk = torch.frombuffer(self._memory, dtype=data.properties.dtype, count=numel)
        return chunk.reshape(data.chunk.sizes)


def _in_chunks(item: WriteItem) -> Iterator[WriteItem]:
    """Yield items that together write what one would, some rows each."""
    data = item.tensor_data
    if data is None or not data.size:
        yield item
        return
    num_rows = data.size[0]
    row_nbytes = data.properties.dtype.itemsize * torch.Size(data.size[1:]).numel()
    step = max(1, _MAX_CHUNK_NBYTES // max(1, row_nbytes))
    if num_rows <= step:
        yield item
        return
    for start, stop in itertools.pairwise([*range(0, num_rows, step), num_rows]):
        offsets = torch.Size((start, *(0,) * (len(data.size) - 1)))
        chunk = ChunkStorageMetadata(offsets, torch.Size((stop - start, *data.size[1:])))
        yield WriteItem(
            index=MetadataIndex(item.index.fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=data.properties, size=data.size),
        )


class _Stand:
    """Makes tensors without bytes that stand for the stored ones.

    Attributes:
        rows: By the id of what stands for a row of a tensor, where that is.
    """

    def __init__(self, source: Source) -> None:
        self.rows: dict[int, _Row] = {}
        self._source = source

    def decode(self, node: Json) -> Any:
        """Return the value of a node; what ranks have saved is a dict of the ranks."""
        if (values := ranks_of(node)) is not None:
            last = len(values) - 1
            return {
                f"rank_{rank}": decode(values[min(rank, last)], partial(self._row, rank))
                for rank in range(self._num_ranks(values))
            }
        if not _has_ranks(node):
            return decode(node, self._whole)
        items = items_of(node)
        if items is not None:
            return {key: self.decode(item) for key, item in items}
        return [self.decode(element) for element in elements_of(node) or ()]

    def _num_ranks(self, values: Sequence[Json]) -> int:
        stacked = {key for _, key in references(values[0], "")}
        return stored_in(self._source, min(stacked)).shape[0] if stacked else len(values)

    def _whole(self, key: str) -> torch.Tensor:
        stored = stored_in(self._source, key)
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")

    def _row(self, rank: int, key: str) -> torch.Tensor:
        row = self._whole(key)[0]
        self.rows[id(row)] = _Row(key, rank * row.nbytes)
        return row


def _has_ranks(node: Json) -> bool:
    if ranks_of(node) is not None:
        return True
    items = items_of(node)
    below = elements_of(node) if items is None else [item for _, item in items]
    return any(map(_has_ranks, below or ()))
