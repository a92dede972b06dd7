"""Places for checkpoints that are no directories: whatever fsspec has a file system for.

[Note: object stores]
An object appears whole or not at all, and is never changed afterwards. So every rank writes a
file of its own, whose name no other save uses, and the commit record is put in its place when all
of them are there: that is the one moment in which the checkpoint becomes the new one. What the
record before it named is deleted then.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

from .exceptions import CheckpointError

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?://.*")
_DELAYS_SECONDS = (0.1, 0.5, 2.0)
# What does not become better by trying again.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class Storage:
    """The files of one checkpoint at a URL.

    Requests that fail are tried again a few times.

    Args:
        url: Where it is, as fsspec understands it.

    Attributes:
        url: Where it is.

    Raises:
        CheckpointError: If fsspec, or what it needs for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            fsspec: Any = import_module("fsspec.core")
            self._system, self._root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"cannot use {url}: {error}; pip install 'vescale-ckpt[fsspec]' for s3://"
            ) from error
        # What others have written since is not in its cache of listings.
        self._system.invalidate_cache()

    @property
    def is_local(self) -> bool:
        """Whether this is an ordinary directory."""
        protocol = self._system.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    @property
    def root(self) -> str:
        """The path within the file system."""
        return self._root

    def nbytes(self, name: str) -> int:
        """Return the length of a file."""
        return int(self._tried(lambda: self._system.size(self._path(name))))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return bytes of a file, fewer if it ends before."""
        if not nbytes:
            return b""
        # By name: file systems do not agree about the order.
        span = {"start": offset, "end": offset + nbytes}
        return self._tried(lambda: self._system.cat_file(self._path(name), **span))

    def put(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, as a whole."""
        self._tried(lambda: self._system.pipe_file(self._path(name), content))

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._tried(lambda: self._system.rm_file(self._path(name)))

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to be written from its beginning to its end."""
        # Some file systems have directories after all.
        self._tried(lambda: self._system.makedirs(self._root, exist_ok=True))
        with self._system.open(self._path(name), "wb") as stream:
            yield stream

    def retry(self, action: Callable[[], T]) -> T:
        """Do something that can be done again from its beginning; see the class."""
        return self._tried(action)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, action: Callable[[], T]) -> T:
        for delay in _DELAYS_SECONDS:
            try:
                return action()
            except _FINAL:
                raise
            except OSError:
                time.sleep(delay)
        return action()


def storage_of(path: str | os.PathLike[str]) -> Storage | None:
    """Return the storage that a URL stands for, None for a path."""
    if not isinstance(path, str) or not _URL.fullmatch(path):
        return None
    return Storage(path)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path of a directory.

    Raises:
        ValueError: If it is a URL of something else.
    """
    storage = storage_of(path)
    if storage is None:
        return os.path.abspath(path)
    if not storage.is_local:
        raise ValueError(f"expected the path of a directory, got the URL {path!r}")
    return storage.root
