"""The file layout: which tensor lies where, a pure function of the global table of tensors.

Every rank computes the same answer, so no rank has to be asked where to write.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import repeat
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any, NamedTuple

from .dtypes import DTYPES

# A safetensors reader wants no gaps between tensors, so only the header can be padded.
HEADER_ALIGNMENT = 4096
MAX_FILE_NBYTES = 8 << 30
# safetensors reads no longer header.
MAX_HEADER_NBYTES = 100_000_000
_RANK_FILE = re.compile(r"rank-\d{5,}-[0-9a-f]{16}\.safetensors")


class TensorInfo(NamedTuple):
    """A tensor as every rank knows it.

    Attributes:
        key: Dotted key in the whole state.
        group: Top-level key of the state; empty for a tensor directly at the top.
        name: Key within the group; the tensor's name in the file.
        dtype: Name of the dtype in safetensors.
        shape: Global shape.
    """

    key: str
    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return nbytes_of(self.dtype, self.shape)


class StoredTensor(NamedTuple):
    """Where a whole tensor lies, row by row.

    Attributes:
        file: Name of the file in the checkpoint's directory.
        name: Name of the tensor in the file.
        dtype: Name of the dtype in safetensors.
        shape: Global shape.
        offset: First byte, from the start of the file.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return nbytes_of(self.dtype, self.shape)


# What the constructor does, too, at twice the cost.
_stored_tensor: Callable[[Any], StoredTensor] = partial(tuple.__new__, StoredTensor)


class TensorRun(NamedTuple):
    """Tensors of the same dtype and shape that lie in a file one after the other.

    Attributes:
        file: Name of the file in the checkpoint's directory.
        dtype: Name of the dtype in safetensors.
        shape: Global shape of each.
        offset: First byte of the first, from the start of the file.
        names: Their names in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    names: Sequence[str]

    @property
    def stop(self) -> int:
        """Where the last one ends in the file."""
        return self.offset + len(self.names) * nbytes_of(self.dtype, self.shape)

    def tensors(self) -> Iterator[StoredTensor]:
        """Return where each of them lies."""
        nbytes = nbytes_of(self.dtype, self.shape)
        offsets = range(self.offset, self.stop, nbytes) if nbytes else repeat(self.offset)
        fields = (repeat(self.file), self.names, repeat(self.dtype), repeat(self.shape), offsets)
        return map(_stored_tensor, zip(*fields, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file to write: its head, and its length including what ranks fill in."""

    head: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """All files of a checkpoint but the manifest, and where each tensor lies."""

    files: dict[str, PlannedFile]
    tensors: dict[str, StoredTensor]


def plan_files(table: Iterable[TensorInfo], max_file_nbytes: int = MAX_FILE_NBYTES) -> FilePlan:
    """Lay out the tensors of ``table`` in files; the order of ``table`` does not matter.

    A group that does not fit into one file is split, neighbours by name staying together, and
    gets an index file in HuggingFace's layout.
    """
    groups: dict[str, list[TensorInfo]] = {}
    for entry in sorted(table, key=attrgetter("key")):
        groups.setdefault(entry.group, []).append(entry)
    plan = FilePlan(files={}, tensors={})
    for group, stem in _stems(groups).items():
        shards = _split(groups[group], max_file_nbytes)
        names = file_names(stem, len(shards))
        for name, shard in zip(names, shards, strict=True):
            lay_out(name, _alike(shard), plan, alignment=HEADER_ALIGNMENT)
        if len(shards) > 1:
            _add_index(stem, groups[group], plan)
    return plan


# Models repeat the same layer many times.
@lru_cache(maxsize=4096)
def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def rank_file_stem(rank: int, token: str) -> str:
    """Return how the file of a rank is called that a save writes, without its suffix."""
    return f"rank-{rank:05d}-{token[:16]}"


def is_rank_file(name: str) -> bool:
    """Return whether a file looks as if a save had written it for one of its ranks."""
    return _RANK_FILE.fullmatch(name) is not None


def _stems(groups: Mapping[str, object]) -> dict[str, str]:
    """Return a file name without suffix for each group, different even where case is lost."""
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for group in sorted(groups):
        plain = re.sub(r"^-|[^A-Za-z0-9_-]", "_", group)[:80] or "tensors"
        stem = plain
        if stem != group or stem.lower() in taken or re.search(r"-\d{5}-of-\d{5}$", stem):
            stem = f"{plain}-{sha256(group.encode()).hexdigest()[:8]}" if group else plain
        while stem.lower() in taken:
            stem += "_"
        taken.add(stem.lower())
        stems[group] = stem
    return stems


def _split(entries: list[TensorInfo], max_file_nbytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    filled = described = 0
    for entry in entries:
        nbytes = nbytes_of(entry.dtype, entry.shape)
        # More than a tensor takes in the header, whatever its name consists of.
        line_nbytes = 6 * len(entry.name) + 200
        is_full = filled + nbytes > max_file_nbytes or described + line_nbytes > MAX_HEADER_NBYTES
        if shards[-1] and is_full:
            shards.append([])
            filled = described = 0
        shards[-1].append(entry)
        filled += nbytes
        described += line_nbytes
    return shards


def file_names(stem: str, count: int) -> list[str]:
    """Return how the files of a group are called, as HuggingFace's libraries number them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def lay_out(
    file: str, runs: Sequence[Sequence[TensorInfo]], plan: FilePlan, *, alignment: int
) -> None:
    """Add a file to a plan, in which tensors lie one after the other.

    Those of a run have one dtype and shape. The first lies at a multiple of ``alignment``.
    """
    head = _head(runs, alignment)
    offset = len(head)
    for run in runs:
        names = [entry.name for entry in run]
        stretch = TensorRun(file, run[0].dtype, run[0].shape, offset, names)
        keys = [entry.key for entry in run]
        plan.tensors.update(zip(keys, stretch.tensors(), strict=True))
        offset = stretch.stop
    plan.files[file] = PlannedFile(head=head, nbytes=offset)


def _alike(entries: Iterable[TensorInfo]) -> list[list[TensorInfo]]:
    """Put alike tensors side by side: wide dtypes, then large tensors first.

    The first keeps every element aligned, the second most tensors on pages.
    """
    kinds: dict[tuple[str, tuple[int, ...]], list[TensorInfo]] = {}
    for entry in entries:
        kinds.setdefault((entry.dtype, entry.shape), []).append(entry)
    return [kinds[kind] for kind in sorted(kinds, key=_place)]


def _place(kind: tuple[str, tuple[int, ...]]) -> tuple[int, int, str, tuple[int, ...]]:
    dtype, shape = kind
    return (-DTYPES[dtype].itemsize, -nbytes_of(dtype, shape), dtype, shape)


def _head(runs: Sequence[Sequence[TensorInfo]], alignment: int) -> bytes:
    """Return the length and the header of a safetensors file, padded."""
    # Written by hand: for many tensors that takes half as long as the json module.
    lines = ['{"__metadata__":{"format":"pt"}']
    stop = 0
    for run in runs:
        dtype, shape = run[0].dtype, run[0].shape
        nbytes = nbytes_of(dtype, shape)
        kind = f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'
        for entry in run:
            start, stop = stop, stop + nbytes
            name = encode_basestring(entry.name)
            lines.append(f'{name}:{{{kind},"data_offsets":[{start},{stop}]}}')
    text = (",".join(lines) + "}").encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text


def _add_index(stem: str, entries: list[TensorInfo], plan: FilePlan) -> None:
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: plan.tensors[entry.key].file for entry in entries},
    }
    text = json.dumps(index, indent=2, ensure_ascii=False).encode()
    plan.files[f"{stem}.safetensors.index.json"] = PlannedFile(head=text, nbytes=len(text))
