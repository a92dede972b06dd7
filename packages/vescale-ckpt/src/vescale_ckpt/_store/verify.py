"""Verify a committed checkpoint without loading it: is every byte as it was saved?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vescale_ckpt._format.blocks import Blocks
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._format.safetensors import read_header
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .reader import CheckpointReader


def complaints_about(
    open_checkpoint: Callable[[], CheckpointReader],
    *,
    num_threads: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Read every byte of a checkpoint and return what is wrong with it, nothing if all is well.

    ``progress`` is called with the number of blocks done and to do.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        with open_checkpoint() as reader:
            return [*_wrong_blocks(reader, num_threads, progress), *wrong_headers(reader)]
    except CheckpointError as error:
        return [str(error)]


def _wrong_blocks(
    reader: CheckpointReader, num_threads: int, progress: Callable[[int, int], None]
) -> Iterator[str]:
    blocks = [
        Blocks(name, block, block + 1)
        for name, file in reader.manifest.files.items()
        for block in range(len(file.checksums))
    ]

    def check(item: Blocks) -> str | None:
        try:
            reader.check_blocks(item)
        except CorruptCheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(num_threads) as pool:
        for done, complaint in enumerate(pool.map(check, blocks), start=1):
            progress(done, len(blocks))
            if complaint is not None:
                yield complaint


def wrong_headers(reader: CheckpointReader) -> Iterator[str]:
    """Yield where a file's own header tells another story than the manifest."""
    for name, file in reader.manifest.files.items():
        if name.endswith(".safetensors"):
            try:
                stored = read_header(name, file.nbytes, partial(reader.content, name))
            except ValueError:
                stored: dict[str, StoredTensor] = {}
            expected = {
                tensor.name: tensor
                for _, tensor in reader.manifest.extents()
                if tensor.file == name
            }
            for key in sorted(stored.keys() ^ expected.keys()):
                yield f"{reader.path / name}: tensor {key!r} is not in both header and manifest"
            for key in sorted(stored.keys() & expected.keys()):
                if stored[key] != expected[key]:
                    yield (
                        f"{reader.path / name}: tensor {key!r} is {stored[key][2:]} in the "
                        f"header, {expected[key][2:]} in the manifest"
                    )
