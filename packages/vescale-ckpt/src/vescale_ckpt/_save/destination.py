"""Where a save goes and what becomes of what is there already."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vescale_ckpt._io.object_store import ObjectStore, object_store_of
from vescale_ckpt._store.atomic_directory import check_replaceable
from vescale_ckpt._store.retention import check_keep_last

FileLayout = Literal["shared", "per_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """What a save was told about its files.

    Attributes:
        where: The checkpoint's directory, or the storage of its URL.
        has_rank_files: Whether every rank writes a file of its own.
        keep_last: How many checkpoints to keep; None to delete nothing.
    """

    where: Path | ObjectStore
    has_rank_files: bool
    keep_last: int | None

    def check(self) -> None:
        """Refuse to replace what is no checkpoint."""
        if isinstance(self.where, Path):
            check_replaceable(self.where)


def destination_of(
    path: str | os.PathLike[str], *, layout: FileLayout | None, keep_last: int | None
) -> Destination:
    """Return where to save.

    Raises:
        ValueError: If the options do not fit together.
        CheckpointError: If there is no way to write to the URL.
    """
    storage = object_store_of(path)
    if layout not in (None, "shared", "per_rank"):
        raise ValueError(f"expected 'shared' or 'per_rank' as layout, got {layout!r}")
    if storage is None or storage.is_local:
        where = Path(os.path.abspath(path) if storage is None else storage.root)
        if keep_last is not None:
            check_keep_last(where, keep_last)
        return Destination(where=where, has_rank_files=layout == "per_rank", keep_last=keep_last)
    if layout == "shared":
        raise ValueError(f"ranks cannot share the files of {path}; save with layout='per_rank'")
    if keep_last is not None:
        check_keep_last(storage, keep_last)
    return Destination(where=storage, has_rank_files=True, keep_last=keep_last)
