"""The numbered checkpoints of one place: which is the last good one, which may go.

[Note: no pointer]
Nothing is written down about which checkpoint is the latest: a pointer and the checkpoints could
disagree after a crash. A checkpoint appears in one step, by a rename or with its commit record,
and disappears in one, so a listing is the truth at every moment. They are ordered by the numbers
in their names, never by clocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ._series_directory import DirectorySeries
from ._series_storage import StorageSeries
from ._storage import Storage, local_path, storage_of
from .exceptions import CheckpointError

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")


class _Place(Protocol):
    """Where the checkpoints of a series are."""

    def names(self) -> Iterable[str]:
        """Return the names of what could be checkpoints."""
        ...

    def where(self, name: str) -> Path | str:
        """Return the path or the URL of a checkpoint."""
        ...

    def is_whole(self, name: str) -> bool:
        """Return whether a checkpoint's record is sound and its files have their lengths."""
        ...

    def is_sound(self, name: str) -> bool:
        """Return whether every byte of a checkpoint is as it was saved."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete checkpoints, so that each is whole or none at every moment."""
        ...

    def remove_leftovers(self, older: Sequence[str]) -> None:
        """Delete what dead writers have left.

        Args:
            older: The names of the series before its last whole checkpoint.
        """
        ...


@dataclass(frozen=True, slots=True, order=True)
class _Numbered:
    number: int
    prefix: str
    name: str


def list_checkpoints(
    directory: str | os.PathLike[str], *, prefix: str | None = None
) -> list[Path | str]:
    """Return the whole checkpoints whose names end with a number, the highest last.

    A checkpoint is whole if its commit record is sound and its files have the lengths that they
    were committed with; ``vescale-ckpt verify`` reads every byte.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on. Or the URL of
            such a place.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.

    Returns:
        Their paths, or their URLs if ``directory`` is one that is no local directory.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
        OSError: If a URL cannot be reached: an older one is not taken for the last then.
    """
    place = _place_of(directory)
    series = _numbered(place, prefix)
    return [place.where(name) for name in series if place.is_whole(name)]


def latest(directory: str | os.PathLike[str], *, prefix: str | None = None) -> Path | str | None:
    """Return the whole checkpoint with the highest number in its name, None if there is none.

    Ranks may call this, each for itself, as long as none of them saves or deletes meanwhile.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on. Or the URL of
            such a place.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.

    Returns:
        Its path, or its URL if ``directory`` is one that is no local directory.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
        OSError: If a URL cannot be reached: an older one is not taken for the last then.
    """
    place = _place_of(directory)
    name = _last_whole(place, _numbered(place, prefix))
    return None if name is None else place.where(name)


def remove_older(
    directory: str | os.PathLike[str],
    *,
    keep_last: int,
    prefix: str | None = None,
    thorough: bool = False,
    dry_run: bool = False,
) -> list[Path | str]:
    """Delete all but the last whole checkpoints, and what dead writers have left behind.

    A checkpoint that is not whole does not count as kept and is not deleted. Call this on one
    rank only.

    In a directory a live writer holds a lock, so what it writes is left alone whatever it is. In
    an object store nothing tells a live writer from a dead one. There the files that no commit
    record names are deleted only where the number is below that of the last whole checkpoint.
    That is safe as long as nobody is saving under such a number: numbers go up, and a job saves
    one checkpoint after the other. A save whose files are deleted all the same finds them
    missing before it commits, and fails.

    Args:
        directory: Where the checkpoints are, a directory or a URL.
        keep_last: How many to keep, at least one.
        prefix: What their names begin with; None if all begin alike.
        thorough: Whether to read every byte of those that are kept before others are deleted.
        dry_run: Whether only to find out what would be deleted.

    Returns:
        The checkpoints that were deleted: paths, or URLs as :func:`list_checkpoints` returns.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``.
        OSError: If a URL cannot be reached.
        ValueError: If ``keep_last`` is less than one.
    """
    check_keep_last(None, keep_last)
    place = _place_of(directory)
    series = _numbered(place, prefix)
    is_good = place.is_sound if thorough else place.is_whole
    removed = _superfluous(series, keep_last, is_good, place.is_whole)
    if not dry_run:
        _remove(place, series, removed)
    return [place.where(name) for name in removed]


def keep_newest(where: Path | Storage, keep_last: int) -> None:
    """Delete the predecessors of a checkpoint that was just committed, but for some.

    The one at ``where`` is kept whatever its number.
    """
    if isinstance(where, Storage):
        place = StorageSeries(where.parent())
    else:
        place = DirectorySeries(where.parent)
    series = _numbered(place, _prefix_of(where.name))
    others = [name for name in series if name != where.name]
    removed = _superfluous([*others, where.name], keep_last, place.is_whole, place.is_whole)
    _remove(place, series, removed)


def check_keep_last(where: Path | Storage | None, keep_last: int) -> None:
    """Refuse to keep nothing, or the predecessors of a checkpoint without a number.

    Raises:
        ValueError: If ``keep_last`` is less than one, or the name does not end with a number.
    """
    if where is not None:
        _prefix_of(where.name)
    if keep_last < 1:
        raise ValueError(f"expected keep_last of at least 1, got {keep_last}")


def _place_of(directory: str | os.PathLike[str]) -> _Place:
    storage = storage_of(directory)
    if storage is None or storage.is_local:
        return DirectorySeries(Path(local_path(directory)))
    return StorageSeries(storage)


def _prefix_of(name: str) -> str:
    found = _NUMBERED.fullmatch(name)
    if found is None:
        raise ValueError(
            f"expected a path whose name ends with a number, such as step-100, to know which "
            f"checkpoints are older; got {name!r}"
        )
    return found[1]


def _numbered(place: _Place, prefix: str | None) -> list[str]:
    """Return the names with numbers, the highest last."""
    entries = [
        _Numbered(int(found[2]), found[1], name)
        for name in place.names()
        if (found := _NUMBERED.fullmatch(name)) and prefix in (None, found[1])
    ]
    prefixes = sorted({entry.prefix for entry in entries})
    if len(prefixes) > 1:
        raise CheckpointError(
            f"the numbered checkpoints in {place.where('')} begin with "
            f"{', '.join(map(repr, prefixes))}; say which with prefix"
        )
    return [entry.name for entry in sorted(entries)]


def _last_whole(place: _Place, series: Sequence[str]) -> str | None:
    return next((name for name in reversed(series) if place.is_whole(name)), None)


def _superfluous(
    series: Sequence[str],
    keep_last: int,
    is_good: Callable[[str], bool],
    is_whole: Callable[[str], bool],
) -> list[str]:
    """Return what comes before the last ``keep_last`` good ones and is whole itself."""
    kept = 0
    superfluous: list[str] = []
    for name in reversed(series):
        if kept < keep_last:
            kept += is_good(name)
        elif is_whole(name):
            superfluous.append(name)
    return superfluous[::-1]


def _remove(place: _Place, series: Sequence[str], removed: Sequence[str]) -> None:
    place.remove(removed)
    last = _last_whole(place, series)
    place.remove_leftovers(series[: series.index(last)] if last is not None else [])
