"""File handles: the files of a checkpoint's directory, open when they are read.

[Note: handles]
A process may have about a thousand files open, and a checkpoint may consist of as many. So the
directory stays open, and of its files those that were used last; the others are opened again
when they are wanted. As many as a load may hold are opened at once: these stay readable even if
a save replaces the directory meanwhile. A later one may be gone by then, which is an error.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .direct_io import open_direct

# What says something about the file itself; all else is no reason to take it for damaged.
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_MIN_OPEN, _MAX_OPEN = 8, 1024


@dataclass(slots=True, eq=False)
class Handle:
    """A file that is open.

    Attributes:
        cached: Descriptor that reads through the page cache.
        direct: Descriptor that reads past it; None where the file system has no such thing.
        num_users: How many threads are reading.
    """

    cached: int
    direct: int | None
    num_users: int = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)


class Handles:
    """The files of one directory; see [Note: handles]. Threads may share it.

    ``most`` are held open; None for what this process can spare.
    """

    def __init__(self, path: Path, *, follow_links: bool, most: int | None = None) -> None:
        self._path = path
        self._follow_links = follow_links
        # A pipe would wait for a writer otherwise.
        self._flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        self._most = _spare_handles() if most is None else most
        self._lock = threading.Lock()
        self._open: dict[str, Handle] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._directory: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def content(self, name: str, limit: int) -> bytes:
        """Return all of a small file."""
        self.nbytes(name)
        try:
            opened = os.open(name, self._flags, dir_fd=self._directory)
        except OSError as error:
            raise self._named(error, name) from error
        with open(opened, "rb") as stream:
            if os.fstat(stream.fileno()).st_size > limit:
                raise CorruptCheckpointError(
                    f"{self._path / name} is too long for a manifest; the checkpoint is "
                    f"damaged, load another one"
                )
            return stream.read(limit)

    def nbytes(self, name: str, role: Callable[[], str] = lambda: "a file") -> int:
        """Return the length of a file, and remember which file it is.

        ``role`` says what it is of the checkpoint, for messages.

        Raises:
            CorruptCheckpointError: If there is no such file, or it is something else.
            OSError: If that cannot be found out.
        """
        try:
            found = os.stat(name, dir_fd=self._directory, follow_symlinks=self._follow_links)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise self._named(error, name) from error
            raise CorruptCheckpointError(
                f"cannot open {self._path / name}, {role()} of the checkpoint: {error.strerror}"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise CorruptCheckpointError(
                f"cannot open {self._path / name}, {role()} of the checkpoint: it is "
                f"{_kind(found.st_mode)}, expected an ordinary file"
            )
        self._files[name] = (found.st_dev, found.st_ino)
        return found.st_size

    def hold(self) -> None:
        """Open files whose lengths were asked for, as many as there may be."""
        for name in list(self._files)[: self._most]:
            with self.use(name):
                pass

    def held(self) -> list[str]:
        """Return the files that are open."""
        return list(self._open)

    @contextmanager
    def use(self, name: str) -> Iterator[Handle]:
        """Give a file that stays open for the time of the block, the same one as before."""
        with self._lock:
            handle = self._open.pop(name, None) or self._opened(name)
            self._open[name] = handle  # the last in order is the one used last
            handle.num_users += 1
        try:
            yield handle
        finally:
            with self._lock:
                handle.num_users -= 1

    def close(self) -> None:
        """Close everything."""
        for handle in self._open.values():
            handle.close()
        self._open.clear()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _opened(self, name: str) -> Handle:
        idle = [other for other, handle in self._open.items() if not handle.num_users]
        for other in idle[: len(self._open) + 1 - self._most]:
            self._open.pop(other).close()
        try:
            cached = os.open(name, self._flags, dir_fd=self._directory)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise self._replaced(name) from error
            raise self._named(error, name) from error
        handle = Handle(cached, None)
        try:
            found = os.fstat(cached)
            if (found.st_dev, found.st_ino) != self._files[name]:
                raise self._replaced(name)
            handle.direct = open_direct(name, self._flags, self._directory)
        except BaseException:
            handle.close()
            raise
        if handle.direct is not None and hasattr(os, "posix_fadvise"):
            # Otherwise a look at one page of the cache has the disk read its neighbours.
            with suppress(OSError):
                os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_RANDOM)
        return handle

    def _replaced(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path / name} was replaced or deleted while the checkpoint was read; is a "
            f"job saving to it? Load again"
        )

    def _named(self, error: OSError, name: str) -> OSError:
        """Return an error that says which file of which directory."""
        return OSError(error.errno, error.strerror, str(self._path / name))


def _spare_handles() -> int:
    """Return how many files to hold open: a quarter of what is allowed, two descriptors each."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MAX_OPEN
    return max(_MIN_OPEN, min(_MAX_OPEN, allowed // 8))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def kind_of_special(path: Path) -> str | None:
    """Return what a file is that cannot be copied, None if it is a file, directory or link."""
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        return None
    return _kind(mode)
