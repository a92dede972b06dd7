"""Rank files: every rank writes a file of its own, where files cannot be shared.

Every rank writes the boxes that it owns, as they lie in its memory, one after the other; nothing
is exchanged. The manifest says which box of which tensor lies where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup
from vescale_ckpt._format.dtypes import NAMES
from vescale_ckpt._format.file_layout import StoredTensor, TensorInfo, plan_files, rank_file_stem
from vescale_ckpt._format.manifest import Manifest, StoredBox, StoredFile
from vescale_ckpt._io.sequential_writer import BLOCK_NBYTES, Create, write_files_in_order
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._state.local_shards import LocalShard
from vescale_ckpt._store.storage import Storage
from vescale_ckpt.exceptions import CheckpointError
from vescale_dtensor import Box

from .consistency import SavePlan


class _Own(NamedTuple):
    """A box that this rank writes."""

    key: str
    box: Box
    memory: torch.Tensor


def write_rank_files(
    storage: Storage,
    token: str,
    save_plan: SavePlan,
    shards: Mapping[str, LocalShard],
    ranks: ControlGroup,
) -> Callable[[], Manifest]:
    """Write one file per rank, and return what makes the manifest. Every rank must call this."""
    step = AllOrNone(ranks)
    stem = rank_file_stem(ranks.rank, token)
    try:
        with step:
            own = _own_boxes(save_plan, shards, ranks)
            step.message = storage.write(token, lambda create: _write(create, stem, own))
    except CheckpointError:
        # After a lost contact rank 0 may have gone on, and named the file in the manifest.
        if step.has_failed:
            storage.discard(f"{stem}.safetensors")
        raise
    return lambda: _manifest(save_plan, step.messages)


def _own_boxes(
    save_plan: SavePlan, shards: Mapping[str, LocalShard], ranks: ControlGroup
) -> list[_Own]:
    own: list[_Own] = []
    for key in save_plan.owned:
        shard = shards[key]
        own += [
            _Own(key, held.box, held.of(shard.local)) for held in shard.boxes if held.box.numel
        ]
    # What every rank has, each rank writes a share of.
    for key in save_plan.shared[ranks.rank :: ranks.size]:
        own.append(_Own(key, Box.whole(shards[key].shape), shards[key].local))
    return own


def _write(create: Create, stem: str, own: list[_Own]) -> dict[str, Any]:
    """Write the boxes to one file and return what the manifest has to say about it."""
    named = {f"{each.key}@{','.join(map(str, each.box.offset))}": each for each in own}
    table = [
        TensorInfo(name, stem, name, NAMES[each.memory.dtype], each.box.shape)
        for name, each in named.items()
    ]
    plan = plan_files(table, 1 << 62)

    def content(name: str) -> Iterator[memoryview]:
        return packed_chunks(named[name].memory)

    files = write_files_in_order(create, plan, content)
    return {
        "files": {name: [file.nbytes, list(file.checksums)] for name, file in files.items()},
        "boxes": [
            [each.key, list(each.box.offset), list(each.box.shape), *_place(plan.tensors[name])]
            for name, each in named.items()
        ],
    }


def _manifest(save_plan: SavePlan, messages: list[dict[str, Any]]) -> Manifest:
    entries = {entry.key: entry for entry in save_plan.table}
    boxes: dict[str, list[StoredBox]] = {key: [] for key in entries}
    for message in messages:
        for key, offset, shape, file, name, start in message["boxes"]:
            stored = StoredTensor(file, name, entries[key].dtype, tuple(shape), start)
            boxes[key].append(StoredBox(Box(tuple(offset), tuple(shape)), stored))
    tensors: dict[str, StoredTensor] = {}
    for key, entry in entries.items():
        covered = sum(stored.nbytes for _, stored in boxes[key])
        if covered != entry.nbytes:
            raise CheckpointError(
                f"the ranks hold {covered} bytes of tensor {key!r}, which has {entry.nbytes}: "
                f"their shards do not make it up exactly once; nothing was committed"
            )
        tensors[key] = StoredTensor("", key, entry.dtype, tuple(entry.shape), 0)
    return Manifest(
        block_nbytes=BLOCK_NBYTES,
        files={
            name: StoredFile(nbytes=nbytes, checksums=tuple(checksums))
            for message in messages
            for name, (nbytes, checksums) in message["files"].items()
        },
        tensors=tensors,
        aliases=save_plan.aliases,
        tree=save_plan.tree,
        boxes={key: tuple(found) for key, found in boxes.items()},
    )


def _place(stored: StoredTensor) -> tuple[str, str, int]:
    return stored.file, stored.name, stored.offset
