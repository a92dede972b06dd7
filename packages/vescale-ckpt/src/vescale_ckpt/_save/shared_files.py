"""Shared files: every rank writes its byte ranges into files of whole tensors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._format.byte_ranges import ByteRanges
from vescale_ckpt._format.crc32 import PartialBlockCrcs
from vescale_ckpt._format.file_layout import FilePlan, StoredTensor
from vescale_ckpt._io.buffer_pool import Scratch
from vescale_ckpt._io.file_writer import Buffers, FileWriter
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._state.local_shards import LocalShard, located
from vescale_ckpt._store.atomic_directory import check_visible

from .replica_check import ReplicaCheck
from .two_phase_write import MIN_RANGE_NBYTES, page_shares, write_in_two_phases


class WriteItem(NamedTuple):
    """A box in this rank's memory, and which of its packed bytes go where."""

    ranges: ByteRanges
    source: torch.Tensor
    first: int
    last: int

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the packed bytes that go somewhere, and which of the packed box comes first."""
        start = 0
        for chunk in packed_chunks(self.source) if self.first < self.last else ():
            first, last = max(self.first - start, 0), min(self.last - start, len(chunk))
            if first < last:
                yield start + first, chunk[first:last]
            start += len(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAssignment:
    """What a rank has to do to get the tensors into the files.

    Attributes:
        own: Tensors of which it writes its own boxes.
        shared: Tensors that every rank holds all of; each writes its share of their bytes.
        exchanged: Tensors whose bytes are exchanged first; the same keys on every rank.
    """

    own: Mapping[str, LocalShard]
    shared: Mapping[str, LocalShard]
    exchanged: Mapping[str, LocalShard]


def create_files(directory: Path, plan: FilePlan) -> None:
    """Create the files in full length, so that a full disk is found before anything else."""
    for name, file in plan.files.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if file.nbytes:
                _reserve(descriptor, file.nbytes)
        finally:
            os.close(descriptor)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its length, and space on the disk where the system can do that."""
    if hasattr(os, "posix_fallocate"):  # macOS lacks it
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    os.ftruncate(descriptor, nbytes)


def write_files(
    directory: Path,
    plan: FilePlan,
    assignment: WriteAssignment,
    sums: Mapping[str, PartialBlockCrcs],
    replicas: ReplicaCheck,
    ranks: ControlGroup,
) -> None:
    """Write this rank's share of the files, and sync it to the disk. Every rank must call this.

    ``sums`` takes account of the bytes written to each file, but for copies, ``replicas`` of those
    of tensors that every rank holds. Rank 0 writes the files' heads, too.
    """
    with Buffers() as buffers:
        _write_exchanged(directory, plan, assignment, sums, buffers, ranks)
        keys = keys_by_file(plan, assignment)
        for name, file in plan.files.items():
            if name not in keys and ranks.rank != 0:
                continue
            with FileWriter(directory / name, sums[name], buffers) as writer:
                if ranks.rank == 0:
                    writer.write(0, memoryview(file.head))
                for key in keys.get(name, ()):
                    writer.account(
                        replicas.written[name] if key in assignment.shared else sums[name]
                    )
                    for item in write_items_of(key, plan, assignment, ranks):
                        _write_item(writer, item)
                writer.finish()
    if ranks.size > 1:
        _check_replicas(plan, assignment, replicas, (ranks.rank + 1) % ranks.size, ranks.size)


def _check_replicas(
    plan: FilePlan,
    assignment: WriteAssignment,
    replicas: ReplicaCheck,
    writer_rank: int,
    num_ranks: int,
) -> None:
    """Take account of what another rank writes, as this one holds it; see [Note: copies]."""
    for key, shard in assignment.shared.items():
        sums = replicas.checked[plan.tensors[key].file]
        item = _share(plan.tensors[key], shard, writer_rank, num_ranks)
        for start, chunk in item.chunks():
            sums.add(item.ranges.start + start, chunk)


def _share(stored: StoredTensor, shard: LocalShard, rank: int, num_ranks: int) -> WriteItem:
    """Return what a rank writes of a tensor that all of them hold; perhaps nothing."""
    start, stop = page_shares(stored, num_ranks)[rank]
    ranges = ByteRanges(stored.offset, stored.nbytes)
    return WriteItem(ranges, shard.local, start - stored.offset, stop - stored.offset)


def _write_exchanged(
    directory: Path,
    plan: FilePlan,
    assignment: WriteAssignment,
    sums: Mapping[str, PartialBlockCrcs],
    buffers: Buffers,
    ranks: ControlGroup,
) -> None:
    """Write in two phases; see [Note: two-phase write]."""
    check_visible(directory)
    scratch = Scratch()
    by_file: dict[str, list[str]] = {}
    for key in sorted(assignment.exchanged, key=lambda key: plan.tensors[key].offset):
        by_file.setdefault(plan.tensors[key].file, []).append(key)
    for name in sorted(by_file):
        tensors = [(plan.tensors[key], assignment.exchanged[key]) for key in by_file[name]]
        with FileWriter(directory / name, sums[name], buffers) as writer:
            write_in_two_phases(writer, tensors, ranks, scratch)
            writer.finish()


def keys_by_file(plan: FilePlan, assignment: WriteAssignment) -> dict[str, list[str]]:
    """Return of which tensors this rank writes its own boxes or a share, in file order."""
    result: dict[str, list[str]] = {}
    for key, stored in plan.tensors.items():
        if key in assignment.own or key in assignment.shared:
            result.setdefault(stored.file, []).append(key)
    return result


def write_items_of(
    key: str, plan: FilePlan, assignment: WriteAssignment, ranks: ControlGroup
) -> Iterator[WriteItem]:
    """Yield what this rank writes of a tensor, in file order."""
    stored = plan.tensors[key]
    if key in assignment.own:
        for memory, ranges in located(assignment.own[key], stored):
            yield WriteItem(ranges, memory, 0, ranges.total_nbytes)
        return
    item = _share(stored, assignment.shared[key], ranks.rank, ranks.size)
    if item.first < item.last:
        yield item


def _write_item(writer: FileWriter, item: WriteItem) -> None:
    ranges = item.ranges
    scattered = ranges.num_ranges > 1 and ranges.nbytes < MIN_RANGE_NBYTES
    # The page cache is better at putting short ranges together than the disk.
    write = writer.write_through_cache if scattered else writer.write
    for start, chunk in item.chunks():
        for offset, lower, upper in ranges.locate(start, len(chunk)):
            write(offset, chunk[lower:upper])
