"""Numbered checkpoints at a URL; see retention.py and [Note: object stores]."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_ckpt._format.file_layout import is_rank_file
from vescale_ckpt._format.manifest import MANIFEST_NAME
from vescale_ckpt._io.object_store import ObjectStore
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .object_reader import ObjectStoreReader, has_manifest, read_manifest_of
from .verify import complaints_about


class StorageSeries:
    """The checkpoints below a URL.

    Args:
        root: The place that they lie in.
    """

    def __init__(self, root: ObjectStore) -> None:
        self._root = root

    def names(self) -> list[str]:
        """Return the names of what has something below it."""
        return [name for name, entry in self._root.entries().items() if entry.is_directory]

    def where(self, name: str) -> str:
        """Return the URL of a checkpoint."""
        return self._root.child(name).url

    def defect(self, name: str) -> str | None:
        """Return why this is no whole checkpoint, None if it is one; see retention.py.

        A place that cannot be reached is an error, not a checkpoint that is not whole. Headers
        of files are not looked at: that would be two more requests a file.
        """
        try:
            ObjectStoreReader(self._root.child(name)).close()
        except FileNotFoundError:
            return ""
        except CorruptCheckpointError as error:
            return str(error)
        except CheckpointError:
            if has_manifest(self._root.child(name)):
                raise
            return ""  # a writer is on its way, or has died
        return None

    def defect_of_bytes(self, name: str) -> str | None:
        """Return why not every byte of a checkpoint is as it was saved, None if all are."""
        return next(iter(complaints_about(self.where(name))), None)

    def is_ours(self, name: str) -> bool:
        """Return True: object stores have no links."""
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Delete the manifest of each checkpoint, which makes it none, then the other files."""
        for name in names:
            storage = self._root.child(name)
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
            storage = self._root.child(name)
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
