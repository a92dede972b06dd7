"""The numbered checkpoints of one directory: which is the last good one, which may go.

[Note: no pointer]
Nothing is written down about which checkpoint is the latest: a pointer and the directories could
disagree after a crash. Checkpoints appear and disappear by one rename, so a listing of the
directory is the truth at every moment. They are ordered by the numbers in their names, never by
clocks.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ._commit import interrupted, remove_leftovers, sync_directory
from ._read import Reader
from ._storage import local_path
from ._verify import verify
from .exceptions import CheckpointError

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]+\.(saving|replaced|removed)")


@dataclass(frozen=True, slots=True, order=True)
class _Numbered:
    number: int
    prefix: str
    path: Path


def list_checkpoints(
    directory: str | os.PathLike[str], *, prefix: str | None = None
) -> list[Path]:
    """Return the whole checkpoints whose names end with a number, the highest last.

    A checkpoint is whole if its commit record is sound and its files have the lengths that they
    were committed with; ``vescale-ckpt verify`` reads every byte.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
    """
    root = Path(local_path(directory))
    return [entry.path for entry in _numbered(root, prefix) if _is_whole(entry.path)]


def latest(directory: str | os.PathLike[str], *, prefix: str | None = None) -> Path | None:
    """Return the whole checkpoint with the highest number in its name, None if there is none.

    Ranks may call this, each for itself, as long as none of them saves or deletes meanwhile.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
    """
    root = Path(local_path(directory))
    candidates = reversed(_numbered(root, prefix))
    return next((entry.path for entry in candidates if _is_whole(entry.path)), None)


def remove_older(
    directory: str | os.PathLike[str],
    *,
    keep_last: int,
    prefix: str | None = None,
    thorough: bool = False,
    dry_run: bool = False,
) -> list[Path]:
    """Delete all but the last whole checkpoints, and what dead writers have left behind.

    A checkpoint that is not whole does not count as kept and is not deleted. Call this on one
    rank only.

    Args:
        directory: Where the checkpoints are.
        keep_last: How many to keep, at least one.
        prefix: What their names begin with; None if all begin alike.
        thorough: Whether to read every byte of those that are kept before others are deleted.
        dry_run: Whether only to find out what would be deleted.

    Returns:
        The checkpoints that were deleted.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
        ValueError: If ``keep_last`` is less than one.
    """
    check_keep_last(None, keep_last)
    root = Path(local_path(directory))
    series = [entry.path for entry in _numbered(root, prefix)]
    is_good = _is_sound if thorough else _is_whole
    removed = _superfluous(series, keep_last, is_good)
    if not dry_run:
        _remove(root, removed)
    return removed


def keep_newest(path: Path, keep_last: int) -> None:
    """Delete the predecessors of a checkpoint that was just committed, but for some.

    The one at ``path`` is kept whatever its number.
    """
    series = _numbered(path.parent, _prefix_of(path))
    others = [entry.path for entry in series if entry.path != path]
    removed = _superfluous([*others, path], keep_last, _is_whole)
    _remove(path.parent, removed)


def _prefix_of(path: Path) -> str:
    found = _NUMBERED.fullmatch(path.name)
    if found is None:
        raise ValueError(
            f"expected a path whose name ends with a number, such as step-100, to know which "
            f"checkpoints are older; got {path.name!r}"
        )
    return found[1]


def check_keep_last(path: Path | None, keep_last: int) -> None:
    """Refuse to keep nothing, or the predecessors of a checkpoint without a number.

    Raises:
        ValueError: If ``keep_last`` is less than one, or the name does not end with a number.
    """
    if path is not None:
        _prefix_of(path)
    if keep_last < 1:
        raise ValueError(f"expected keep_last of at least 1, got {keep_last}")


def _numbered(root: Path, prefix: str | None) -> list[_Numbered]:
    """Return the directories with numbers, and those that were just being replaced."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    hidden = {found[1] for name in names if (found := _HIDDEN.fullmatch(name))}
    visible = {name for name in names if not name.startswith(".")}
    entries: list[_Numbered] = []
    for name in sorted(visible | hidden):
        found = _NUMBERED.fullmatch(name)
        if found is None or (prefix is not None and found[1] != prefix):
            continue
        path = root / name
        if path.is_dir() or interrupted(path) is not None:
            entries.append(_Numbered(int(found[2]), found[1], path))
    prefixes = sorted({entry.prefix for entry in entries})
    if len(prefixes) > 1:
        raise CheckpointError(
            f"the numbered directories in {root} begin with {', '.join(map(repr, prefixes))}; "
            f"say which with prefix"
        )
    return sorted(entries)


def _superfluous(
    series: list[Path], keep_last: int, is_good: Callable[[Path], bool]
) -> list[Path]:
    """Return what comes before the last ``keep_last`` good ones and is whole itself."""
    kept = 0
    superfluous: list[Path] = []
    for path in reversed(series):
        if kept < keep_last:
            kept += is_good(path)
        elif _is_whole(path):
            superfluous.append(path)
    return superfluous[::-1]


def _is_whole(path: Path) -> bool:
    try:
        Reader(interrupted(path) or path).close()
    except (OSError, CheckpointError):
        return False
    return True


def _is_sound(path: Path) -> bool:
    return not verify(interrupted(path) or path)


def _remove(root: Path, paths: list[Path]) -> None:
    for path in paths:
        where = interrupted(path) or path
        hidden = root / f".{path.name}.{uuid.uuid4().hex}.removed"
        # In one step, so that nobody finds a part of it; perhaps another job was faster.
        with suppress(FileNotFoundError):
            os.rename(where, hidden)
    sync_directory(root)
    for name in os.listdir(root):
        if found := _HIDDEN.fullmatch(name):
            if found[2] == "removed":
                shutil.rmtree(root / name, ignore_errors=True)
            else:
                remove_leftovers(root / found[1])
