"""Open checkpoints of any format to copy and to compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from vescale_ckpt._format.file_layout import MAX_FILE_NBYTES
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._io.sequential_writer import Progress
from vescale_ckpt._state.key_filter import KeyFilter
from vescale_ckpt._store.atomic_directory import interrupted
from vescale_ckpt._store.open import open_checkpoint
from vescale_ckpt.exceptions import CheckpointError

from .dcp_export import write_dcp
from .dcp_import import DcpSource
from .huggingface_export import MAX_EXPORTED_FILE_NBYTES, Names, write_safetensors
from .huggingface_load import open_safetensors
from .streaming_copy import FileSource, write_checkpoint_from

Format = Literal["vescale", "hf", "dcp"]


def format_of(path: Path) -> Format:
    """Return which format a checkpoint has."""
    if path.is_file():
        return "hf"
    if (path / "vescale.json").exists() or interrupted(path) is not None:
        return "vescale"
    if (path / ".metadata").exists():
        return "dcp"
    if any(path.glob("*.safetensors")):
        return "hf"
    raise CheckpointError(
        f"there is no checkpoint at {path}: neither vescale.json, nor safetensors files, nor the "
        f".metadata of torch.distributed.checkpoint"
    )


@contextmanager
def open_source(path: Path | str, key: str) -> Iterator[FileSource | DcpSource]:
    """Open a checkpoint of any format.

    Args:
        path: Where it is; a URL, which is text, holds one of ours.
        key: The top-level key below which a HuggingFace model's tensors are to appear.
    """
    if isinstance(path, str):
        with open_checkpoint(path) as reader:
            yield FileSource(reader)
        return
    path = absolute_path(path)
    match format_of(path):
        case "vescale":
            with open_checkpoint(path) as reader:
                yield FileSource(reader)
        case "hf":
            with open_safetensors(path, {}, below=key) as reader:
                yield FileSource(reader)
        case "dcp":
            yield DcpSource(path, KeyFilter())


def convert(
    source: Path | str,
    target: Path | str,
    to: Format,
    *,
    key: str,
    dtype: torch.dtype | None,
    max_file_nbytes: int | None,
    progress: Progress,
) -> None:
    """Write a checkpoint in another format, or in other files.

    Raises:
        CheckpointError: If it cannot be read or written, or an option has no meaning here.
    """
    if to != "hf" and dtype is not None:
        raise CheckpointError("dtypes are converted for HuggingFace only; a load has cast=True")
    with open_source(source, key) as opened:
        if to == "vescale":
            limit = max_file_nbytes or MAX_FILE_NBYTES
            write_checkpoint_from(opened, target, max_file_nbytes=limit, progress=progress)
        elif to == "hf":
            names = Names(key=key, rename={}, skip=(), dtype=dtype)
            limit = max_file_nbytes or MAX_EXPORTED_FILE_NBYTES
            write_safetensors(opened, target, names, limit, progress)
        elif max_file_nbytes is not None:
            raise CheckpointError("torch's writer decides how large its files are")
        elif isinstance(opened, DcpSource):
            raise CheckpointError(f"{source} is a DCP checkpoint already")
        else:
            write_dcp(opened, target, progress)
