"""Which tensor lies where in which file: a pure function of the global table of tensors.

Every rank computes the same answer, so no rank has to be asked where to write.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from json.encoder import encode_basestring
from typing import NamedTuple

from ._dtypes import DTYPES

# A safetensors reader wants no gaps between tensors, so only the header can be padded.
_HEADER_ALIGNMENT = 4096
MAX_FILE_NBYTES = 8 << 30


class TableEntry(NamedTuple):
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
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


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
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file to write: its head, and its length including what ranks fill in."""

    head: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """All files of a checkpoint but the commit record, and where each tensor lies."""

    files: dict[str, PlannedFile]
    tensors: dict[str, StoredTensor]


def plan_files(table: Iterable[TableEntry], max_file_nbytes: int = MAX_FILE_NBYTES) -> FilePlan:
    """Lay out the tensors of ``table`` in files; the order of ``table`` does not matter.

    A group that does not fit into one file is split, neighbours by name staying together, and
    gets an index file in HuggingFace's layout.
    """
    groups: dict[str, list[_Sized]] = {}
    for entry in sorted(table):
        sized = _Sized(-DTYPES[entry.dtype].itemsize, -entry.nbytes, entry.name, entry)
        groups.setdefault(entry.group, []).append(sized)
    plan = FilePlan(files={}, tensors={})
    for group, stem in _stems(groups).items():
        shards = _split(groups[group], max_file_nbytes)
        names = _file_names(stem, len(shards))
        for name, shard in zip(names, shards, strict=True):
            _lay_out(name, shard, plan)
        if len(shards) > 1:
            _add_index(stem, groups[group], plan)
    return plan


class _Sized(NamedTuple):
    """A tensor with what decides about its place in a file.

    Wide dtypes first keeps every element aligned; large tensors first keeps most on pages.
    """

    minus_itemsize: int
    minus_nbytes: int
    name: str
    entry: TableEntry


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


def _split(entries: list[_Sized], max_file_nbytes: int) -> list[list[_Sized]]:
    shards: list[list[_Sized]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled - entry.minus_nbytes > max_file_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled -= entry.minus_nbytes
    return shards


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _lay_out(file: str, entries: list[_Sized], plan: FilePlan) -> None:
    ordered = sorted(entries)
    # Written by hand: for many tensors that takes half as long as the json module.
    lines = ['{"__metadata__":{"format":"pt"}']
    stop = 0
    for _, minus_nbytes, name, entry in ordered:
        start, stop = stop, stop - minus_nbytes
        shape = ",".join(map(str, entry.shape))
        lines.append(
            f'{encode_basestring(name)}:{{"dtype":"{entry.dtype}","shape":[{shape}],'
            f'"data_offsets":[{start},{stop}]}}'
        )
    text = (",".join(lines) + "}").encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    plan.files[file] = PlannedFile(head=head, nbytes=len(head) + stop)
    offset = len(head)
    for _, minus_nbytes, name, entry in ordered:
        plan.tensors[entry.key] = StoredTensor(file, name, entry.dtype, entry.shape, offset)
        offset -= minus_nbytes


def _add_index(stem: str, entries: list[_Sized], plan: FilePlan) -> None:
    index = {
        "metadata": {"total_size": -sum(sized.minus_nbytes for sized in entries)},
        "weight_map": {sized.name: plan.tensors[sized.entry.key].file for sized in entries},
    }
    text = json.dumps(index, indent=2, ensure_ascii=False).encode()
    plan.files[f"{stem}.safetensors.index.json"] = PlannedFile(head=text, nbytes=len(text))
