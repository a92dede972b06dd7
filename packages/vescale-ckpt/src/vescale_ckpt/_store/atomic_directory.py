"""Atomic directories: they appear whole or not at all.

[Note: committing]
A checkpoint is written into a hidden sibling of its path, ``.NAME.TOKEN.saving``, every file is
synced, and then one rename gives it its name. An older checkpoint at the path changes places
with the new one in a single system call where the file system can do that, so that at every
moment the path holds one or the other. Where it cannot (some network file systems), the old one
first becomes ``.NAME.TOKEN.replaced``; should the writer die between the two renames, loading
reads that one and the next save puts it back.

The writer holds a lock on its directory. Whatever a dead writer has left behind is unlocked,
which is how the next save knows, without clocks and process ids, that it may delete it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable
from contextlib import closing, suppress
from enum import Enum
from pathlib import Path

from vescale_ckpt._format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    dump_manifest,
    parse_manifest,
)
from vescale_ckpt._io.file_handles import Handles, kind_of_special
from vescale_ckpt._io.sequential_writer import created_in
from vescale_ckpt.exceptions import CheckpointError

_RETRY_SECONDS = 0.05
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Network file systems; NFS says EBADF of a directory, which cannot be opened for writing.
_NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EBADF,
)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class StagedDirectory:
    """A locked hidden directory that becomes the checkpoint at ``path``."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.directory = staging_directory(path, token)
        self._aside = path.parent / f".{path.name}.{token}.replaced"
        os.makedirs(path.parent, exist_ok=True)
        _check_foreign_files(path)
        recover(path)
        remove_leftovers(path)
        self._lock = _make_locked(self.directory)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and publish."""
        with created_in(self.directory)(MANIFEST_NAME) as stream:
            stream.write(dump_manifest(manifest))
        self.publish()

    def publish(self) -> None:
        """Make the directory the checkpoint at ``path``; see [Note: committing]."""
        _keep_foreign_files(self.path, self.directory)
        os.fsync(self._lock)
        replaced = self._rename()
        sync_directory(self.path.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def close(self) -> None:
        """Give up the lock, and the directory if it was not published."""
        os.close(self._lock)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _rename(self) -> Path | None:
        """Give the directory its name and return where the old checkpoint is now."""
        for _ in range(100):
            try:
                if not self.path.exists():
                    os.rename(self.directory, self.path)
                    return None
                if swap_directories(self.directory, self.path):
                    return self.directory
                os.rename(self.path, self._aside)
                os.rename(self.directory, self.path)
                return self._aside
            except OSError as error:
                # Another job saves to the same path at this very moment.
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise CheckpointError(f"{self.path} keeps changing; is another job saving to it?")


def staging_directory(path: Path, token: str) -> Path:
    """Return where the checkpoint of ``path`` is written before it is published."""
    return path.parent / f".{path.name}.{token}.saving"


def check_visible(directory: Path) -> None:
    """Refuse a place where this rank does not see what rank 0 has made.

    Raises:
        CheckpointError: With the place, and what to do.
    """
    if not is_there(directory):
        raise CheckpointError(
            f"{directory}, made by rank 0, is not visible here; save to a path on a file system "
            f"that all ranks share"
        )


def check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a checkpoint or an empty directory."""
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {os.path.realpath(path)}, which a save would replace; "
            f"save to that path, or to another one"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} exists and is no directory; save to another path")
    if path.is_mount():
        raise CheckpointError(
            f"{path} is a mount point, which cannot be replaced; save to a directory in it, "
            f"{path / 'step-1'} for example"
        )
    if path.samefile(os.curdir):
        raise CheckpointError(
            f"{path} is the working directory, which cannot be replaced under the process; save "
            f"to a directory in it, {path / 'step-1'} for example"
        )
    if not (path / MANIFEST_NAME).exists() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} holds files but no checkpoint ({MANIFEST_NAME} is missing); it will not be "
            f"replaced, save to another path or remove it"
        )


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap_directories(a: Path, b: Path) -> bool:
    """Let two directories change places atomically; False if the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if rename(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(b))


def recover(path: Path) -> None:
    """Put the old checkpoint back if its writer died while replacing it."""
    replaced = interrupted(path)
    if replaced is not None:
        os.rename(replaced, path)
        sync_directory(path.parent)


def place_of(path: Path) -> Path:
    """Return where the checkpoint of ``path`` is: there, or where a writer left it that died."""
    return interrupted(path) or path


def is_there(path: Path) -> bool:
    """Return whether there is something.

    Raises:
        OSError: If that cannot be found out; ``Path.exists`` may say no then.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def interrupted(path: Path) -> Path | None:
    """Return where the checkpoint of ``path`` is if a writer died while replacing it."""
    if is_there(path):
        return None
    aside = [entry for entry in _siblings(path, "replaced") if is_there(entry / MANIFEST_NAME)]
    return max(aside, key=lambda entry: entry.stat().st_mtime_ns, default=None)


def remove_leftovers(path: Path) -> None:
    """Delete what dead writers of ``path`` have left; a live one holds a lock."""
    leftovers = _siblings(path, "saving")
    if path.exists():
        leftovers += _siblings(path, "replaced")
    for leftover in leftovers:
        try:
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue  # gone, or of somebody else
        try:
            if _lock(descriptor) is _Lock.HELD:
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(descriptor)


def _siblings(path: Path, kind: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.{kind}")
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    return [path.parent / name for name in sorted(names) if pattern.fullmatch(name)]


def _make_locked(directory: Path) -> int:
    """Make a directory and return its descriptor, locked."""
    for _ in range(100):
        with suppress(FileExistsError):
            os.mkdir(directory)
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            # Another job may have taken it for a leftover before it was locked.
            is_taken = _lock(descriptor) is _Lock.TAKEN
            if not is_taken and os.fstat(descriptor).st_nlink and is_there(directory):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_RETRY_SECONDS if is_taken else 0)
    raise CheckpointError(f"{directory} keeps disappearing; is another job deleting it?")


class _Lock(Enum):
    """What has become of an attempt to lock a directory."""

    HELD = "this process has it"
    TAKEN = "another one has it"
    UNKNOWN = "the file system has no locks"


def _lock(descriptor: int) -> _Lock:
    """Lock an open directory, if nobody else has.

    Raises:
        OSError: If it cannot be locked for a reason that says nothing about other writers.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.TAKEN
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"this file system cannot lock directories ({error.strerror}): what a writer that "
            f"dies leaves behind, .NAME.TOKEN.saving, is not deleted by the next save; delete it "
            f"when no job is saving",
            stacklevel=2,
        )
        return _Lock.UNKNOWN
    return _Lock.HELD


def _check_foreign_files(path: Path) -> None:
    """Refuse what cannot be carried over to the new checkpoint, before anything is written."""
    for name in sorted(_foreign_names(path)):
        for directory, _, files in [(path, (), [name]), *os.walk(path / name)]:
            for file in files:
                special = kind_of_special(Path(directory, file))
                if special is not None:
                    raise CheckpointError(
                        f"{Path(directory, file)} is {special}, which a save that replaces {path} "
                        f"cannot carry over; remove it, or save to another path"
                    )


def _keep_foreign_files(old: Path, new: Path) -> None:
    """Carry over what people put beside the tensors, a config.json for example."""
    for name in sorted(_foreign_names(old)):
        source, target = old / name, new / name
        if target.exists():
            continue
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target, follow_symlinks=False)


def _foreign_names(directory: Path) -> Iterable[str]:
    try:
        names = set(os.listdir(directory))
        manifest = read_manifest(directory)
    except (OSError, CheckpointError):
        # Nothing there, or a damaged checkpoint: which files are foreign cannot be told.
        return ()
    return names - {MANIFEST_NAME, *manifest.files}


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a directory."""
    with closing(Handles(directory, follow_links=True, most=1)) as handles:
        text = handles.content(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
    return parse_manifest(text, str(directory / MANIFEST_NAME))
