"""A place in an object store as storage; see [Note: object stores]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from vescale_ckpt._format.file_layout import is_rank_file
from vescale_ckpt._format.manifest import MANIFEST_NAME, Manifest, dump_manifest
from vescale_ckpt._io.object_store import ObjectStore
from vescale_ckpt._io.sequential_writer import Create
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .object_reader import ObjectStoreReader, has_manifest, odd_file, read_manifest_of
from .reader import CheckpointReader
from .storage import T


class StagedObjects:
    """Objects that become a checkpoint by its manifest; see [Note: object stores]."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def commit(self, manifest: Manifest) -> None:
        """Put the manifest, and delete what only the checkpoint before had."""
        odd = odd_file(self._store, manifest.files)
        if odd is not None:
            raise CheckpointError(
                f"{self._store.url}/{odd[0]} was written just now, but "
                f"{'is not there' if odd[1] is None else f'has {odd[1]} bytes'}; is another job "
                f"deleting checkpoints? Nothing was committed"
            )
        before = _files_of(self._store)
        self._store.put(MANIFEST_NAME, dump_manifest(manifest))
        self._store.remove_all(name for name in before if name not in manifest.files)

    def close(self) -> None:
        """Do nothing: each rank deletes its own file."""


class ObjectStorage:
    """A place in an object store that is a checkpoint, or in which checkpoints lie."""

    is_link = False

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def where(self) -> str:
        return self._store.url

    def parent(self) -> ObjectStorage:
        return ObjectStorage(self._store.parent())

    def child(self, name: str) -> ObjectStorage:
        return ObjectStorage(self._store.child(name))

    def open(self) -> CheckpointReader:
        return ObjectStoreReader(self._store)

    def read_manifest(self) -> Manifest:
        return read_manifest_of(self._store)[1]

    def defect(self) -> str | None:
        """Return why this is no whole checkpoint, None if it is one.

        A place that cannot be reached is an error, not a checkpoint that is not whole. Headers
        of files are not looked at: that would be two more requests a file.
        """
        try:
            self.open().close()
        except FileNotFoundError:
            return ""
        except CorruptCheckpointError as error:
            return str(error)
        except CheckpointError:
            if has_manifest(self._store):
                raise
            return ""  # a writer is on its way, or has died
        return None

    def check_replaceable(self) -> None:
        """Do nothing: a save deletes only what the manifest before names."""

    def staging_directory(self, token: str) -> None:
        """Return None: no two ranks can write to one object."""

    def stage(self, token: str) -> StagedObjects:
        return StagedObjects(self._store)

    def write(self, token: str, action: Callable[[Create], T]) -> T:
        return self._store.retry(lambda: action(self._store.create))

    def discard(self, name: str) -> None:
        with suppress(OSError):
            self._store.remove(name)

    def names(self) -> list[str]:
        """Return the names of what has something below it."""
        return [name for name, entry in self._store.entries().items() if entry.is_directory]

    def remove(self, names: Sequence[str]) -> None:
        """Delete the manifest of each checkpoint, which makes it none, then the other files."""
        for name in names:
            storage = self._store.child(name)
            files = storage.names_below()
            named = _named_files(storage)
            if named is None:
                continue
            storage.remove(MANIFEST_NAME)
            # Last what a later call would take for leftovers, should this one die. What looks
            # like a rank's file and was not in the manifest may be of a save that goes on.
            storage.remove_all(file for file in files if not is_rank_file(file))
            storage.remove_all(file for file in files if file in named)
            storage.remove_directory()

    def remove_leftovers(self, older: Sequence[str]) -> None:
        """Delete the files of ranks that no manifest names, where the number is an old one."""
        for name in older:
            storage = self._store.child(name)
            # In this order: what a save has committed since is in its manifest.
            files = [file for file in storage.names_below() if is_rank_file(file)]
            named = _named_files(storage)
            if named is not None and not named.issuperset(files):
                storage.remove_all(file for file in files if file not in named)
                storage.remove_directory()


def _named_files(storage: ObjectStore) -> set[str] | None:
    """Return the files that belong to a checkpoint, None if its manifest cannot be read."""
    if not has_manifest(storage):
        return set()
    try:
        return set(read_manifest_of(storage)[1].files)
    except CheckpointError:
        return None


def _files_of(storage: ObjectStore) -> list[str]:
    try:
        return list(read_manifest_of(storage)[1].files)
    except CheckpointError:
        return []
