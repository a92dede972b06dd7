"""Read and write the checkpoints of torch.distributed.checkpoint (DCP) with torch's own code.

[Note: DCP and pickle]
A DCP checkpoint is pickle: its ``.metadata`` is unpickled by torch's reader as soon as it is
opened, which runs whatever code it names. Only the functions of this module touch such files.
The values in the checkpoint, which torch would unpickle likewise, are read by torch's safe
unpickler here; one that it refuses is an error.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from vescale_ckpt._comm.control_group import AllOrNone, current_control_group
from vescale_ckpt._format.dtypes import NAMES
from vescale_ckpt._format.file_layout import MAX_FILE_NBYTES, StoredTensor
from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._format.state_encoding import encode
from vescale_ckpt._format.state_tree import Json, reference_to
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._io.sequential_writer import Progress, no_progress
from vescale_ckpt._io.tensor_bytes import flat_bytes
from vescale_ckpt._load.hand_over import hand_over
from vescale_ckpt._load.match import match
from vescale_ckpt._state.arguments import checked
from vescale_ckpt._state.key_filter import KeyFilter, key_filter_of, renamed
from vescale_ckpt._state.local_shards import LocalShard
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError, MismatchError
from vescale_dtensor import Box

from .streaming_copy import write_checkpoint_from


def load_dcp(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of ``torch.distributed.checkpoint`` into ``state``.

    Every rank of the default process group must call this. It works like :func:`load`, under
    any placements, but such files have no checksums: what is damaged within a tensor is not
    noticed. Reading them runs torch's unpickler, and with it any code that the file
    ``.metadata`` names: read no DCP checkpoint of people whom you do not trust.

    Args:
        path: The checkpoint's directory.
        state: What to fill.
        strict: As for :func:`load`.
        only: As for :func:`load`.
        rename: As for :func:`load`.
        cast: As for :func:`load`.

    Returns:
        A dict like ``state``: the same tensors and objects, and the stored Python values.

    Raises:
        CorruptCheckpointError: If files are missing, or do not make up a tensor.
        MismatchError: If keys, shapes or dtypes differ from those of the checkpoint.
        CheckpointError: If a value cannot be read without running code, or a rank failed.
    """
    ranks = current_control_group()
    with ranks.together(), torch.no_grad():
        with AllOrNone(ranks):
            key_filter = checked(partial(key_filter_of, only, rename))
            source = DcpSource(path, key_filter)
            manifest = Manifest(
                block_nbytes=1, files={}, tensors=source.tensors, aliases={}, tree=source.tree
            )
            matched = match(
                state, manifest, ranks.rank, strict=strict, cast=cast, key_filter=key_filter
            )
        matched.report(strict=strict)
        with AllOrNone(ranks):
            source.fill(matched.targets)
        with AllOrNone(ranks):
            hand_over(matched.stateful)
    return matched.result


def import_dcp(
    directory: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress = no_progress,
) -> None:
    """Write a checkpoint with all that one of ``torch.distributed.checkpoint`` holds.

    As much memory is used as the rows take that one stored shard covers. Call this on one rank
    only. It runs torch's unpickler on ``directory``, see :func:`load_dcp`.

    Args:
        directory: The DCP checkpoint.
        checkpoint: The checkpoint to write; one that is there is replaced.
        max_file_nbytes: When to begin another file.
        progress: Called with the number of bytes done and to do.

    Raises:
        CheckpointError: If a value or a tensor cannot be stored without pickle.
    """
    source = DcpSource(directory, KeyFilter())
    write_checkpoint_from(source, checkpoint, max_file_nbytes=max_file_nbytes, progress=progress)


class DcpSource:
    """A DCP checkpoint, opened.

    Args:
        path: Its directory.
        key_filter: What of it is wanted: other values need not be such as can be stored.

    Attributes:
        tree: The state as tagged JSON.
        tensors: Its tensors; files and offsets mean nothing.
        aliases: Nothing: DCP stores tied tensors twice.
    """

    def __init__(self, path: str | os.PathLike[str], key_filter: KeyFilter) -> None:
        self._path = absolute_path(path)
        self._reader = FileSystemReader(self._path)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no DCP checkpoint at {path}: {error}") from error
        except (pickle.UnpicklingError, EOFError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path}: .metadata is damaged: {error}") from error
        self._reader.set_up_storage_reader(metadata, True)
        self.aliases: dict[str, str] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._stored: dict[str, TensorStorageMetadata] = {}
        paths: dict[str, Any] = metadata.planner_data or {}
        values: list[str] = []
        for key, stored in metadata.state_dict_metadata.items():
            wanted = key_filter.wants(renamed(key, key_filter.rename))
            if isinstance(stored, TensorStorageMetadata):
                if stored.properties.dtype in NAMES:
                    self._stored[key] = stored
                    self.tensors[key] = _stored_tensor(key, stored)
                elif wanted:
                    raise CheckpointError(
                        f"{key!r} has {stored.properties.dtype}, which {_NO_PLACE}"
                    )
            elif wanted:
                values.append(key)
        nodes: dict[str, Json] = {key: reference_to(key) for key in self.tensors}
        nodes.update(self._values(values))
        self.tree = _tree({key: tuple(paths.get(key, (key,))) for key in nodes}, nodes)

    def fill(self, targets: Iterable[tuple[LocalShard, str]]) -> None:
        """Read boxes of tensors into the memory of this rank.

        Raises:
            MismatchError: If tensors that share their memory here differ in the checkpoint.
        """
        filled: set[Any] = set()
        views: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        twins: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for part, key in targets:
            for held in part.boxes:
                view = held.of(part.local)
                if (part.identity, held) in filled:
                    # Tied here, but not in the file format.
                    twins.append((key, view, torch.empty_like(view)))
                    view = twins[-1][2]
                filled.add((part.identity, held))
                views.setdefault(key, []).append((held.box, view))
        self._read(views)
        for key, view, twin in twins:
            if not torch.equal(view, twin):
                raise MismatchError(
                    f"{key!r} shares its memory with another tensor here, but not in {self._path}"
                )

    def content(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor: the rows that some shard begins with, at a time."""
        stored = self._stored[key]
        for box in _bands(stored):
            rows = torch.empty(box.shape, dtype=stored.properties.dtype, device="cpu")
            self._read({key: [(box, rows)]})
            packed = flat_bytes(rows)
            assert packed is not None
            yield packed

    def _read(self, views: Mapping[str, list[tuple[Box, torch.Tensor]]]) -> None:
        items: list[ReadItem] = []
        targets: dict[MetadataIndex, torch.Tensor] = {}
        for key, boxes in views.items():
            for box, view in boxes:
                if box.numel:
                    chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                    found = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
                    _check_complete(key, box, found)
                    items += found
                    targets[MetadataIndex(key, chunk.offsets)] = view
        self._load(items, _Into(targets))

    def _values(self, keys: list[str]) -> dict[str, Json]:
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size((0,)),
                storage_index=MetadataIndex(key),
                storage_offsets=torch.Size((0,)),
                lengths=torch.Size((0,)),
            )
            for key in keys
        ]
        into = _Into({})
        self._load(items, into)
        return {key: _as_json(key, value) for key, value in into.values.items()}

    def _load(self, items: list[ReadItem], into: _Into) -> None:
        try:
            self._reader.read_data(LoadPlan(items), into).wait()
        except (OSError, KeyError, EOFError, RuntimeError) as error:
            raise CorruptCheckpointError(f"cannot read {self._path}: {error}") from error


_NO_PLACE = "has no place in a checkpoint; leave it out with only="


class _Into(DefaultLoadPlanner):
    """Where torch's reader puts what it has read."""

    def __init__(self, targets: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.values[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"the value {key!r} cannot be read without running code that it names; leave "
                f"it out with only="
            ) from error

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._targets[read_item.dest_index]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _stored_tensor(key: str, stored: TensorStorageMetadata) -> StoredTensor:
    return StoredTensor(
        file="",
        name=key,
        dtype=NAMES[stored.properties.dtype],
        shape=tuple(stored.size),
        offset=0,
    )


def _bands(stored: TensorStorageMetadata) -> Iterator[Box]:
    shape = tuple(stored.size)
    if not shape:
        yield Box.whole(())
        return
    starts = sorted({0, *(chunk.offsets[0] for chunk in stored.chunks)})
    for start, stop in itertools.pairwise([*starts, shape[0]]):
        yield Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


def _check_complete(key: str, box: Box, items: Iterable[ReadItem]) -> None:
    """Refuse shards that do not make up the box: torch would leave a hole."""
    covered = sum(torch.Size(item.lengths).numel() for item in items)
    if covered != box.numel:
        raise CorruptCheckpointError(
            f"the shards of {key!r} cover {covered} of {box.numel} elements at {box.offset}"
        )


def _as_json(key: str, value: Any) -> Json:
    encoded = encode({key: value})
    if encoded.tensors:
        raise CheckpointError(f"the value {key!r} contains tensors and {_NO_PLACE}")
    return encoded.tree[key]


def _tree(
    paths: Mapping[str, tuple[str | int, ...]], nodes: Mapping[str, Json]
) -> dict[str, Json]:
    """Return the nested state whose leaves are ``nodes``."""
    root: dict[str | int, Any] = {}
    for key, path in paths.items():
        inner = root
        for part in path[:-1]:
            inner = inner.setdefault(part, _Inner())
        inner[path[-1]] = nodes[key]
    return {str(key): _closed(item) for key, item in root.items()}


class _Inner(dict[str | int, Any]):
    """A dict or list of the state, told apart from the JSON of a leaf."""


def _closed(item: Any) -> Json:
    if not isinstance(item, _Inner):
        return item
    keys = list(item)
    if all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):  # pyright: ignore[reportArgumentType]: they are integers
        return [_closed(item[index]) for index in range(len(keys))]
    # DCP turns the keys of dicts into strings; an optimizer's were integers.
    if all(type(key) is int or (str(key).isdecimal() and str(int(key)) == key) for key in keys):
        return {"$dict": [[int(key), _closed(inner)] for key, inner in item.items()]}
    if any(str(key).startswith("$") for key in keys):
        return {"$dict": [[key, _closed(inner)] for key, inner in item.items()]}
    return {str(key): _closed(inner) for key, inner in item.items()}
