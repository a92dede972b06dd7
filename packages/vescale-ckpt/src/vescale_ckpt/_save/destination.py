"""The destination of a save, and what becomes of what is there already."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from vescale_ckpt._store.open import storage_at
from vescale_ckpt._store.retention import check_keep_last
from vescale_ckpt._store.storage import Storage

FileLayout = Literal["shared", "per_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """What a save was told about its files.

    Attributes:
        storage: Where the checkpoint is to be.
        has_rank_files: Whether every rank writes a file of its own.
        keep_last: How many checkpoints to keep; None to delete nothing.
    """

    storage: Storage
    has_rank_files: bool
    keep_last: int | None

    @property
    def options(self) -> dict[str, str | int | None]:
        """What all ranks have to be told alike."""
        layout: FileLayout = "per_rank" if self.has_rank_files else "shared"
        # Ranks may reach one place by several paths, but there it has one name.
        name = {"last part of the path": self.storage.name}
        return {**name, "layout": layout, "keep_last": self.keep_last}


def destination_of(
    path: str | os.PathLike[str], *, layout: FileLayout | None, keep_last: int | None
) -> Destination:
    """Return where to save.

    Raises:
        ValueError: If the options do not fit together.
        CheckpointError: If there is no way to write to the URL.
    """
    storage = storage_at(path)
    if layout not in (None, "shared", "per_rank"):
        raise ValueError(f"expected 'shared' or 'per_rank' as layout, got {layout!r}")
    can_share = storage.staging_directory("") is not None
    if layout == "shared" and not can_share:
        raise ValueError(f"ranks cannot share the files of {path}; save with layout='per_rank'")
    if keep_last is not None:
        check_keep_last(storage, keep_last)
    has_rank_files = layout == "per_rank" or not can_share
    return Destination(storage=storage, has_rank_files=has_rank_files, keep_last=keep_last)
