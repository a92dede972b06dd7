"""Read blocks of a committed checkpoint, and check them.

[Note: cache]
What is in the page cache is read from there. What is not is read past it, which takes a fraction
of the processor time and does not push other data out of memory. Which is which is found out for
some megabytes at a time, by a read of one byte that may not wait. Not of all of them: the kernel
then starts to read what it did not find. At a random place, since a second question about the same
byte, even in a later load, would find what the first has brought in.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vescale_ckpt._format.blocks import Blocks
from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._format.crc32 import crc32
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    parse_manifest,
)
from vescale_ckpt._format.safetensors import header_stop
from vescale_ckpt._io.buffer_pool import keep_buffer, take_buffer
from vescale_ckpt._io.direct_io import MIN_DIRECT_NBYTES, PAGE_NBYTES
from vescale_ckpt._io.file_handles import Handles
from vescale_ckpt.exceptions import CorruptCheckpointError


class CheckpointReader:
    """The open files of one checkpoint.

    Without a ``manifest`` it is read; ``most_open`` files are held open, None for what this
    process can spare.

    The files stay readable, and stay those of this one checkpoint, even if a save replaces the
    directory meanwhile; see [Note: handles] for very many files.

    Attributes:
        path: The checkpoint's directory.
        manifest: What its files hold.
        digest: A number that differs between committed checkpoints.
        has_page_cache: Whether what one process has read is at hand for others of this host.
    """

    has_page_cache = True

    def __init__(
        self,
        path: Path,
        manifest: Manifest | None = None,
        *,
        follow_links: bool = False,
        most_open: int | None = None,
    ) -> None:
        self.path = path
        self.digest = 0
        self._local = threading.local()
        self._buffers: list[Bytes] = []
        # Not seeded: a later load must not ask where this one has.
        self._places = random.Random()
        self._handles = Handles(path, follow_links=follow_links, most=most_open)
        try:
            if manifest is None:
                text = self._handles.content(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
                self.digest = crc32(text)
                manifest = parse_manifest(text, str(path / MANIFEST_NAME))
            self.manifest = manifest
            self._check_lengths()
            self._handles.hold()
            self._check_starts()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is None:  # after an interrupt a thread may still be reading into one
            for buffer in self._buffers:
                keep_buffer(buffer)
        self._buffers.clear()

    def close(self) -> None:
        """Close all files."""
        self._handles.close()

    def check_blocks(self, blocks: Blocks) -> None:
        """Read consecutive blocks and compare their checksums.

        Raises:
            CorruptCheckpointError: With the file, the bytes, and the tensors that lie there.
        """
        self.read_blocks(blocks, self.scratch())

    def read_blocks(self, blocks: Blocks, memory: Bytes) -> Bytes:
        """Read consecutive blocks into ``memory``, whole pages, and compare their checksums.

        Returns:
            The blocks, which may be fewer bytes than there is memory.

        Raises:
            CorruptCheckpointError: With the file, the bytes, and the tensors that lie there.
        """
        file, length = self.manifest.files[blocks.file], self.manifest.block_nbytes
        start = blocks.start * length
        content = memory[: min(blocks.stop * length, file.nbytes) - start]
        if self.is_cached(blocks.file, start, start + len(content)):
            self.read(blocks.file, start, content.data)
        else:
            self._read_pages(blocks.file, start, memory, len(content))
        for number in range(blocks.start, blocks.stop):
            position = number * length - start
            self.check_content(blocks.file, number, [content[position : position + length]])
        return content

    def check_content(self, file: str, block: int, views: Sequence[Bytes]) -> None:
        """Compare the checksum of a block that has been read.

        ``block`` is its number within the file, ``views`` the memory that it was read into, in
        order.

        Raises:
            CorruptCheckpointError: With the file, the bytes, and the tensors that lie there.
        """
        checksums = self.manifest.files[file].checksums
        if not checksums:
            return
        checksum = 0
        for view in views:
            checksum = crc32(view.data, checksum)
        if checksum != checksums[block]:
            raise self.damage(file, block)

    def read_past_cache(self, file: str, start: int, stop: int) -> Bytes:
        """Return at most CHUNK_NBYTES, unchecked, in the memory of this thread."""
        base = start - start % PAGE_NBYTES
        memory = self.scratch()
        self._read_pages(file, base, memory, stop - base)
        return memory[start - base : stop - base]

    def read_into(self, file: str, start: int, views: Sequence[Bytes]) -> None:
        """Read consecutive bytes, unchecked, through the page cache into several places."""
        nbytes = sum(map(len, views))
        with self._handles.use(file) as handle:
            if os.preadv(handle.cached, [view.data for view in views], start) == nbytes:
                return
        for view in views:  # a signal, or the end of the file
            self.read(file, start, view.data)
            start += len(view)

    def bring_in(self, file: str, start: int, stop: int) -> bool:
        """Have the disk read into the page cache what is not there; return whether that goes."""
        with self._handles.use(file) as handle:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.cached, start, stop - start, os.POSIX_FADV_WILLNEED)
            os.preadv(handle.cached, [bytearray(1)], stop - 1)  # waits for it
        return True

    def is_cached(self, file: str, start: int, stop: int) -> bool:
        """Return whether some bytes are to be read through the page cache; see [Note: cache]."""
        with self._handles.use(file) as handle:
            if handle.direct is None or not hasattr(os, "RWF_NOWAIT"):
                return True
            place = self._places.randrange(start, stop)
            try:
                return os.preadv(handle.cached, [bytearray(1)], place, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                # Nobody can say what is in the cache, so everything is read through it.
                return True

    def damage(self, file: str, block: int) -> CorruptCheckpointError:
        """Return the error about a block whose checksum is wrong."""
        first = block * self.manifest.block_nbytes
        last = min(first + self.manifest.block_nbytes, self.manifest.files[file].nbytes)
        return CorruptCheckpointError(
            f"{self.path / file}: bytes {first} to {last} do not match their checksum, "
            f"{self._tensors_at(file, first, last)}; the file is damaged, load another checkpoint"
        )

    def scratch(self) -> Bytes:
        """Return memory of this thread for CHUNK_NBYTES from anywhere in a page."""
        if not hasattr(self._local, "memory"):
            self._local.memory = take_buffer()
            self._buffers.append(self._local.memory)
        return self._local.memory

    def content(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return some bytes of a file."""
        nbytes = max(0, min(nbytes, self.manifest.files[file].nbytes - offset))
        buffer = bytearray(nbytes)
        self.read(file, offset, memoryview(buffer))
        return bytes(buffer)

    def _read_pages(self, file: str, offset: int, memory: Bytes, nbytes: int) -> None:
        """Read past the page cache if that goes and pays.

        ``offset`` is on a page, and ``memory`` whole pages for all of the bytes.
        """
        done = 0
        with self._handles.use(file) as handle:
            if handle.direct is not None and nbytes >= MIN_DIRECT_NBYTES:
                stop = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
                try:
                    done = min(nbytes, os.preadv(handle.direct, [memory.data[:stop]], offset))
                except OSError as error:
                    # EINVAL: this file system wants another alignment than any we know.
                    if error.errno != errno.EINVAL:
                        raise
        self.read(file, offset + done, memory.data[done:nbytes])

    def read(self, file: str, offset: int, view: memoryview) -> None:
        """Fill memory with bytes of a file, unchecked."""
        with self._handles.use(file) as handle:
            while view:
                count = os.preadv(handle.cached, [view], offset)
                if count == 0:
                    raise CorruptCheckpointError(
                        f"{self.path / file} ends at byte {offset}, within "
                        f"{self._tensors_at(file, offset, offset + len(view))}"
                    )
                view, offset = view[count:], offset + count

    def _check_lengths(self) -> None:
        for name, file in self.manifest.files.items():
            actual = self._handles.nbytes(name, partial(self._role, name))
            if actual != file.nbytes:
                lost = self._tensors_at(name, min(actual, file.nbytes), file.nbytes)
                raise CorruptCheckpointError(
                    f"{self.path / name} has {actual} bytes, the checkpoint was committed with "
                    f"{file.nbytes}, {lost}; the file is damaged, load another checkpoint"
                )

    def _check_starts(self) -> None:
        """Refuse tensors that would lie in the header of their file."""
        firsts: dict[str, StoredTensor] = {}
        for _, tensor in self.manifest.extents():
            first = firsts.setdefault(tensor.file, tensor)
            if tensor.offset < first.offset:
                firsts[tensor.file] = tensor
        for name in self._handles.held():
            first = firsts.get(name)
            if first is None or not name.endswith(".safetensors"):
                continue
            start = header_stop(self.content(name, 0, 8))
            if first.offset < start:
                self.check_blocks(Blocks(name, 0, 1))  # more often a bit was lost
                raise CorruptCheckpointError(
                    f"{self.path / name}: tensor {first.name!r} would begin at byte "
                    f"{first.offset}, within the header, which ends at byte {start}; the file is "
                    f"damaged, load another checkpoint"
                )

    def _role(self, name: str) -> str:
        return f"the file with {self._tensors_at(name, 0, self.manifest.files[name].nbytes)}"

    def _tensors_at(self, file: str, start: int, stop: int) -> str:
        names = [
            repr(key)
            for key, tensor in self.manifest.extents()
            if tensor.file == file
            and tensor.offset < stop
            and tensor.offset + tensor.nbytes > start
        ]
        if not names:
            return "no tensor"
        return f"tensors {', '.join(names[:4])}" + (", ..." if len(names) > 4 else "")
