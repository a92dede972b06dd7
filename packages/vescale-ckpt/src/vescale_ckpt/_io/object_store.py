"""Object stores: whatever fsspec has a file system for.

[Note: object stores]
An object appears whole or not at all, and is never changed afterwards. So every rank writes a
file of its own, whose name no other save uses, and the manifest is put in its place when all
of them are there: that is the one moment in which the checkpoint becomes the new one. What the
manifest before it named is deleted then.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from vescale_ckpt.exceptions import CheckpointError

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?://.*")
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_DELAYS_SECONDS = (0.1, 0.5, 2.0)
_NUM_REMOVERS = 16
# What does not become better by trying again.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class Entry(NamedTuple):
    """What a listing says about a name; ``nbytes`` is None for a directory, and if unknown."""

    is_directory: bool
    nbytes: int | None


class ObjectStore:
    """The files of one checkpoint at a URL, or the checkpoints below one.

    Requests that fail are tried again a few times.

    Raises:
        CheckpointError: If fsspec, or what it needs for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = re.sub(r"(?<=[^/:])/+$", "", url)
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

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[1]

    def parent(self) -> ObjectStore:
        """Return the place that this lies in."""
        above = self.url.rsplit("/", 1)[0]
        return ObjectStore(f"{above}/" if above.endswith(":/") else above)

    def child(self, name: str) -> ObjectStore:
        """Return a place within this one."""
        return ObjectStore(self.url + name if self.url.endswith("/") else f"{self.url}/{name}")

    def entries(self) -> dict[str, Entry]:
        """Return what lies directly here, nothing if there is no such place."""
        found = self._listed(lambda: self._system.ls(self._root, detail=True))
        entries: dict[str, Entry] = {}
        for entry in found:
            name = self._relative(entry["name"])
            is_directory = entry["type"] == "directory"
            if name and "/" not in name:
                entries[name] = Entry(is_directory, None if is_directory else entry.get("size"))
        return entries

    def lengths(self) -> dict[str, int]:
        """Return the lengths of files that one listing tells; that of a web server tells none."""
        try:
            entries = self.entries()
        except (OSError, NotImplementedError):
            return {}
        return {name: entry.nbytes for name, entry in entries.items() if entry.nbytes is not None}

    def names_below(self) -> list[str]:
        """Return the names of all files, however deep, relative to here."""
        found = self._listed(lambda: self._system.find(self._root))
        return [name for path in found if (name := self._relative(path))]

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
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self._tried(lambda: self._system.rm_file(self._path(name)))

    def remove_all(self, names: Iterable[str]) -> None:
        """Delete files, several at a time."""
        all_names = list(names)
        with ThreadPoolExecutor(_NUM_REMOVERS) as pool:
            try:
                jobs = [pool.submit(self.remove, name) for name in all_names]
            except RuntimeError:
                jobs = []  # of a save that outlives its program: no thread is started any more
                for name in all_names:
                    self.remove(name)
        for job in jobs:
            job.result()

    def remove_directory(self) -> None:
        """Delete the empty directory that this is, where there are directories."""
        with suppress(OSError, NotImplementedError):
            if self._system.isdir(self._root):
                self._system.rmdir(self._root)

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

    def _relative(self, path: str) -> str:
        root, path = self._root.strip("/"), path.strip("/")
        is_below = not root or path.startswith(f"{root}/")
        return path[len(root) :].strip("/") if is_below else ""

    def _listed(self, action: Callable[[], Iterable[T]]) -> list[T]:
        # Neither old listings nor, to whoever asks for a length later, this one.
        self._system.invalidate_cache()
        try:
            return list(self._tried(action))
        except FileNotFoundError:
            return []
        finally:
            self._system.invalidate_cache()

    def _tried(self, action: Callable[[], T]) -> T:
        for delay in _DELAYS_SECONDS:
            try:
                return action()
            except _FINAL:
                raise
            except OSError:
                time.sleep(delay)
        return action()


def object_store_of(path: str | os.PathLike[str]) -> ObjectStore | None:
    """Return the storage that a URL stands for, None for a path.

    Raises:
        ValueError: If it is a URL that has lost a slash, as ``Path("s3://bucket")`` has.
    """
    if isinstance(path, str) and _URL.fullmatch(path):
        return ObjectStore(path)
    text: Any = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"expected a path of text, got {path!r}")
    if _LOST_SLASH.match(text) and not os.path.lexists(text.split("/")[0]):
        raise ValueError(
            f"{text!r} looks like a URL, but would be a directory of that name; pass it as a "
            f"string with two slashes (pathlib drops one)"
        )
    return None


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads whatever the working directory becomes; ``~`` is one's home."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path of a directory; a URL of something else is a ValueError."""
    store = object_store_of(path)
    if store is not None and not store.is_local:
        raise ValueError(f"expected the path of a directory, got the URL {path!r}")
    return absolute_path(path if store is None else store.root)
