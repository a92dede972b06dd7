"""Verify a checkpoint, for people."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from vescale_ckpt._store.open import open_checkpoint
from vescale_ckpt._store.verify import complaints_about


def verify(
    path: str | os.PathLike[str],
    *,
    num_threads: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Read every byte of a checkpoint and return what is wrong with it, nothing if all is well.

    Args:
        path: The checkpoint's directory or URL.
        num_threads: How many blocks to read at the same time.
        progress: Called with the number of blocks done and to do.
    """
    try:
        return complaints_about(
            partial(open_checkpoint, path), num_threads=num_threads, progress=progress
        )
    except OSError as error:
        return [f"cannot read {path}: {error}"]
