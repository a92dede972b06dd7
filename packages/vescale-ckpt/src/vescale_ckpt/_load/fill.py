"""Fill tensors on all ranks with what lies in files, every block checked by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch.autograd.graph import increment_version

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._comm.hosts import processors_each
from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._io.tensor_bytes import CHUNK_NBYTES
from vescale_ckpt._io.thread_pool import parallel_for
from vescale_ckpt._store.reader import CheckpointReader

from .block_reads import BlockReads
from .read_assignment import assign_reads
from .read_items import ReadItem, read_unaligned
from .two_phase_read import read_in_two_phases


def fill(
    reader: CheckpointReader,
    items: Sequence[ReadItem],
    ranks: ControlGroup,
    hosts: Sequence[str],
    *,
    exchange: bool | None = None,
) -> None:
    """Read ``items``; see [Note: readers]. Every rank must call this.

    ``exchange`` has a block that several ranks need be read by one, which sends it to the others;
    None finds out whether that pays.

    Raises:
        CorruptCheckpointError: If a block that this rank has read is damaged. The other ranks
            have to be told; what the read items hold then is undefined.
    """
    # Autograd does not see bytes that are read into memory: a backward pass of what was computed
    # before has to fail rather than use them.
    increment_version([x.target for x in items if not torch.is_inference(x.target)])
    whole = [item for item in items if not item.is_unaligned]
    unaligned = [item for item in items if item.is_unaligned]
    block_index = BlockIndex(reader.manifest)
    readers = assign_reads(block_index, whole, ranks, in_parts=True)
    exchanging = _whether_to_exchange(exchange, hosts, reader)
    block_reads = BlockReads(
        reader,
        block_index,
        whole,
        readers,
        ranks.rank,
        exchanging=exchanging,
        processors=processors_each(hosts),
    )
    if exchanging:
        # While ranks wait for one another they can read what is theirs alone.
        with ThreadPoolExecutor(1, thread_name_prefix="vescale-ckpt-read") as pool:
            alone = pool.submit(_failure_of_reading, block_reads, unaligned)
            try:
                with ranks.together():
                    read = block_reads.read_to_send
                    read_in_two_phases(whole, readers, block_index, ranks, read)
            except BaseException:
                block_reads.stop()
                raise
            failure = alone.result()
    else:
        failure = _failure_of_reading(block_reads, unaligned)
    block_reads.sums.check(failure, ranks)
    if failure is not None:
        raise failure


def _failure_of_reading(
    block_reads: BlockReads, unaligned: Sequence[ReadItem]
) -> Exception | None:
    try:
        block_reads.read_all()
        parallel_for(partial(read_unaligned, block_reads.reader), unaligned)
    except Exception as error:
        return error
    return None


def check(reader: CheckpointReader, items: Sequence[ReadItem], ranks: ControlGroup) -> None:
    """Read and check what ``items`` need, changing nothing. Every rank must call this."""
    block_index = BlockIndex(reader.manifest)
    readers = assign_reads(block_index, items, ranks, in_parts=False)
    own = np.flatnonzero(readers.reader == ranks.rank).tolist()
    most = max(1, CHUNK_NBYTES // block_index.block_nbytes)
    parallel_for(reader.check_blocks, block_index.chunks(own, most))


def _whether_to_exchange(
    wanted: bool | None, hosts: Sequence[str], reader: CheckpointReader
) -> bool:
    """Return whether ranks send each other what several of them need.

    On one host the page cache does that for them, and faster.
    """
    if len(hosts) == 1:
        return False
    if wanted is not None:
        return wanted
    return len(set(hosts)) > 1 or not reader.has_page_cache
