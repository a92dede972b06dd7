"""Between our checkpoints and HuggingFace's directories of safetensors files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vescale_ckpt._format.dtypes import DTYPES, NAMES
from vescale_ckpt._format.file_layout import TensorInfo, plan_files
from vescale_ckpt._format.state_tree import below, references
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._io.sequential_writer import (
    Progress,
    created_in,
    no_progress,
    write_files_in_order,
)
from vescale_ckpt._state.key_filter import renamed
from vescale_ckpt._store.atomic_directory import sync_directory
from vescale_ckpt._store.open import open_checkpoint
from vescale_ckpt.exceptions import CheckpointError

from .huggingface_load import open_safetensors
from .streaming_copy import FileSource, Source, converted, stored_in, write_checkpoint_from

MAX_EXPORTED_FILE_NBYTES = 5 << 30  # as HuggingFace's own writers do


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    key: str = "model",
    rename: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = MAX_EXPORTED_FILE_NBYTES,
    progress: Progress = no_progress,
) -> None:
    r"""Write the tensors of a checkpoint as HuggingFace's libraries lay out a model.

    The result is ``model.safetensors``, or numbered files and ``model.safetensors.index.json``,
    without ``config.json`` and the like. A few megabytes of memory are used, whatever the size
    of the model, and every block that is read is checked. Call this on one rank only.

    Args:
        checkpoint: A checkpoint's directory.
        directory: Where to write; made if there is none. It must not hold such files yet.
        key: The top-level key of the checkpoint whose tensors to write. Their names are the
            dotted keys below it.
        rename: Regular expressions for whole such names, and what to call the tensor in the
            files (``\1`` stands for the first group). The first that matches counts.
        skip: Regular expressions for whole names in the checkpoint to leave out. Tied weights
            are written under each of their names, which every reader understands; name here
            those that the reader ties itself.
        dtype: What to convert tensors of floating point to; None to leave them as they are.
        max_file_nbytes: When to begin another file.
        progress: Called with the number of bytes done and to do.

    Raises:
        CheckpointError: If there is nothing to write, two tensors would get the same name, or
            the directory holds a model already.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    with open_checkpoint(checkpoint) as reader:
        names = Names(key=key, rename=rename or {}, skip=tuple(skip), dtype=dtype)
        write_safetensors(FileSource(reader), directory, names, max_file_nbytes, progress)


def import_safetensors(
    directory: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    key: str = "model",
    rename: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write a checkpoint with the tensors of HuggingFace safetensors files.

    A few megabytes of memory are used. Call this on one rank only. To fill a model, there is no
    need for this: see :func:`load_safetensors`.

    Args:
        directory: A safetensors file, or a directory with some.
        checkpoint: The checkpoint to write; one that is there is replaced.
        key: The top-level key of the checkpoint that gets the tensors.
        rename: As for :func:`load_safetensors`.
        progress: Called with the number of bytes done and to do.

    Raises:
        CheckpointError: If the files make no sense, or two tensors would get the same name.
    """
    path = absolute_path(directory)
    with open_safetensors(path, rename or {}, below=key) as reader:
        write_checkpoint_from(FileSource(reader), checkpoint, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which tensors to write and what to make of them; see :func:`export_safetensors`."""

    key: str
    rename: Mapping[str, str]
    skip: tuple[str, ...]
    dtype: torch.dtype | None


def write_safetensors(
    source: Source,
    directory: str | os.PathLike[str],
    names: Names,
    max_file_nbytes: int = MAX_EXPORTED_FILE_NBYTES,
    progress: Progress = no_progress,
) -> None:
    """Write tensors of any source as :func:`export_safetensors` does."""
    target = absolute_path(directory)
    _check_empty(target)
    table = _table(source, names)
    if not table:
        raise CheckpointError(
            f"there are no tensors below {names.key!r} to write; the checkpoint has "
            f"{', '.join(map(repr, source.tree)) or 'nothing'}"
        )
    plan = plan_files(table.values(), max_file_nbytes)
    origin = {entry.key: old for old, entry in table.items()}

    def content(name: str) -> Iterator[memoryview]:
        old = origin[name]
        stored = stored_in(source, old).dtype
        return converted(source.content(old), stored, plan.tensors[name].dtype)

    target.mkdir(parents=True, exist_ok=True)
    staging = target / ".vescale-export"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        write_files_in_order(created_in(staging), plan, content, progress)
        # The index is planned last, so a directory with one is complete.
        for name in plan.files:
            os.rename(staging / name, target / name)
        sync_directory(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _table(source: Source, names: Names) -> dict[str, TensorInfo]:
    """Return what to write, by the key in the checkpoint."""
    skipped = dict.fromkeys(names.skip, "")
    table: dict[str, TensorInfo] = {}
    taken: set[str] = set()
    for path, old in references(source.tree.get(names.key), names.key):
        inner = below(path, names.key)
        if not renamed(inner, skipped):
            continue
        name = renamed(inner, names.rename)
        if name in taken:
            raise CheckpointError(f"two tensors would be called {name!r}; rename one of them")
        taken.add(name)
        stored = stored_in(source, old)
        dtype_name = _dtype_name(stored.dtype, names.dtype)
        table[old] = TensorInfo(name, "model", name, dtype_name, stored.shape)
    return table


def _dtype_name(stored: str, wanted: torch.dtype | None) -> str:
    return stored if wanted is None or not DTYPES[stored].is_floating_point else NAMES[wanted]


def _check_empty(directory: Path) -> None:
    present = [*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")]
    if present:
        raise CheckpointError(
            f"{directory} holds {present[0].name!r} already; write to another directory"
        )
