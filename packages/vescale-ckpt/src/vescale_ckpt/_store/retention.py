"""Retention: which of the numbered checkpoints of a place is the last good one, which may go.

[Note: no pointer]
Nothing is written down about which checkpoint is the latest: a pointer and the checkpoints could
disagree after a crash. A checkpoint appears in one step, by a rename or with its manifest,
and disappears in one, so a listing is the truth at every moment. They are ordered by the numbers
in their names, never by clocks.

[Note: whole]
Whether a checkpoint is whole is found out without reading its tensors: the manifest is there
and has the checksum that it says, and so are all files that it names, each an ordinary one of the
length that it was committed with, whose safetensors header lists the tensors of the manifest. What
was never committed is passed over; what was, and is not whole any more, is passed over with a
warning. What keeps us from finding out (no more open files allowed, no permission, a disk that
fails) is raised: an older checkpoint is not taken for the last one because of it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from vescale_ckpt.exceptions import CheckpointError

from .open import storage_at
from .storage import Storage
from .verify import complaints_about

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")


def list_checkpoints(
    directory: str | os.PathLike[str], *, prefix: str | None = None
) -> list[Path | str]:
    """Return the whole checkpoints whose names end with a number, the highest last.

    A checkpoint is whole if its manifest is sound and its files have the lengths that they
    were committed with, and list the tensors of the manifest. A damaged one is left out with a
    warning that names the file. ``vescale-ckpt verify`` reads every byte, this does not.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on. Or the URL of
            such a place.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.

    Returns:
        Their paths, or their URLs if ``directory`` is one that is no local directory.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``, or
            one is of a newer format.
        OSError: If it cannot be found out whether one is whole.
    """
    look = _Look(storage_at(directory))
    series = _numbered(look.place, prefix)
    return [look.place.child(name).where for name in series if look.is_whole(name)]


def latest(
    directory: str | os.PathLike[str], *, prefix: str | None = None, thorough: bool = False
) -> Path | str | None:
    """Return the whole checkpoint with the highest number in its name, None if there is none.

    What was committed and is damaged is passed over with a warning that names the file. As for
    :func:`list_checkpoints`, bytes of tensors are not read, unless ``thorough`` asks for it: a
    load checks them, and refuses what is damaged. Ranks may call this, each for itself, as long
    as none of them saves or deletes meanwhile.

    Args:
        directory: Where the checkpoints are, ``step-100``, ``step-200`` and so on. Or the URL of
            such a place.
        prefix: What their names begin with, ``"step-"``; None if all begin alike.
        thorough: Whether to read every byte, and pass over what is not as it was saved.

    Returns:
        Its path, or its URL if ``directory`` is one that is no local directory.

    Raises:
        CheckpointError: If there are checkpoints that begin differently, and no ``prefix``, or
            the last is of a newer format.
        OSError: If it cannot be found out whether one is whole, because there is no permission
            or a URL cannot be reached: an older one is not taken for the last then.
    """
    look = _Look(storage_at(directory))
    is_good = look.is_sound if thorough else look.is_whole
    series = reversed(_numbered(look.place, prefix))
    name = next((name for name in series if look.is_whole(name) and is_good(name)), None)
    return None if name is None else look.place.child(name).where


def remove_older(
    directory: str | os.PathLike[str],
    *,
    keep_last: int,
    prefix: str | None = None,
    thorough: bool = False,
    dry_run: bool = False,
) -> list[Path | str]:
    """Delete all but the last whole checkpoints, and what dead writers have left behind.

    A checkpoint that is not whole does not count as kept and is not deleted. A symbolic link to
    one counts, but is not deleted. Call this on one rank only.

    In a directory a live writer holds a lock, so what it writes is left alone whatever it is. In
    an object store nothing tells a live writer from a dead one. There the files that no commit
    manifest names are deleted only where the number is below that of the last whole checkpoint.
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
        OSError: If it cannot be found out whether one is whole.
        ValueError: If ``keep_last`` is less than one.
    """
    check_keep_last(None, keep_last)
    look = _Look(storage_at(directory))
    series = _numbered(look.place, prefix)
    is_good = look.is_sound if thorough else look.is_whole
    removed = _superfluous(look, series, keep_last, is_good)
    if not dry_run:
        _remove(look, series, removed)
    return [look.place.child(name).where for name in removed]


def keep_newest(checkpoint: Storage, keep_last: int) -> None:
    """Delete the predecessors of a checkpoint that was just committed, but for some.

    It is kept itself, whatever its number.
    """
    look = _Look(checkpoint.parent())
    series = _numbered(look.place, _prefix_of(checkpoint.name))
    others = [name for name in series if name != checkpoint.name]
    removed = _superfluous(look, [*others, checkpoint.name], keep_last, look.is_whole)
    _remove(look, series, removed)


def check_keep_last(checkpoint: Storage | None, keep_last: int) -> None:
    """Refuse to keep nothing, or the predecessors of a checkpoint without a number.

    Raises:
        ValueError: If ``keep_last`` is less than one, or the name does not end with a number.
    """
    if checkpoint is not None:
        _prefix_of(checkpoint.name)
    if keep_last < 1:
        raise ValueError(f"expected keep_last of at least 1, got {keep_last}")


def _prefix_of(name: str) -> str:
    found = _NUMBERED.fullmatch(name)
    if found is None:
        raise ValueError(
            f"expected a path whose name ends with a number, such as step-100, to know which "
            f"checkpoints are older; got {name!r}"
        )
    return found[1]


def _numbered(place: Storage, prefix: str | None) -> list[str]:
    """Return the names with numbers, the highest last."""
    entries = [
        (int(found[2]), found[1], name)
        for name in place.names()
        if (found := _NUMBERED.fullmatch(name)) and prefix in (None, found[1])
    ]
    prefixes = sorted({found for _, found, _ in entries})
    if len(prefixes) > 1:
        raise CheckpointError(
            f"the numbered checkpoints in {place.where} begin with "
            f"{', '.join(map(repr, prefixes))}; say which with prefix"
        )
    return [name for _, _, name in sorted(entries)]


class _Look:
    """What one call has found out about the checkpoints of a place; warns of each defect once."""

    def __init__(self, place: Storage) -> None:
        self.place = place
        self._is_whole: dict[str, bool] = {}
        self._is_sound: dict[str, bool] = {}

    def is_whole(self, name: str) -> bool:
        """Return whether a checkpoint is whole; see [Note: whole]."""
        if name not in self._is_whole:
            self._is_whole[name] = self._is_good(name, self.place.child(name).defect())
        return self._is_whole[name]

    def is_sound(self, name: str) -> bool:
        """Return whether every byte of a checkpoint is as it was saved."""
        if name not in self._is_sound:
            is_whole = self.is_whole(name)
            self._is_sound[name] = is_whole and self._is_good(
                name, next(iter(complaints_about(self.place.child(name).open)), None)
            )
        return self._is_sound[name]

    def forget(self, names: Sequence[str]) -> None:
        """Take note that checkpoints were deleted."""
        self._is_whole |= dict.fromkeys(names, False)

    def _is_good(self, name: str, defect: str | None) -> bool:
        if defect:
            where = self.place.child(name).where
            warnings.warn(
                f"passed over the checkpoint {where}, which is damaged: {defect}", stacklevel=4
            )
        return defect is None


def _superfluous(
    look: _Look, series: Sequence[str], keep_last: int, is_good: Callable[[str], bool]
) -> list[str]:
    """Return what comes before the last ``keep_last`` good ones, is whole itself and lies here."""
    kept = 0
    superfluous: list[str] = []
    for name in reversed(series):
        if kept < keep_last:
            kept += is_good(name)
        elif look.is_whole(name) and not look.place.child(name).is_link:
            superfluous.append(name)
    return superfluous[::-1]


def _remove(look: _Look, series: Sequence[str], removed: Sequence[str]) -> None:
    look.place.remove(removed)
    look.forget(removed)
    last = next((name for name in reversed(series) if look.is_whole(name)), None)
    look.place.remove_leftovers(series[: series.index(last)] if last is not None else [])
