"""Fill tensors on all ranks with what lies in files, every block checked by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from vescale_ckpt._comm.control_group import Ranks
from vescale_ckpt._comm.hosts import processors_each
from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._io.tensor_bytes import CHUNK_NBYTES
from vescale_ckpt._io.thread_pool import in_threads
from vescale_ckpt._store.reader import Reader

from .block_reads import OwnUnits
from .read_assignment import choose_readers
from .read_items import Piece, read_torn
from .two_phase_read import exchange as exchange_blocks


def fill(
    reader: Reader,
    pieces: Sequence[Piece],
    ranks: Ranks,
    hosts: Sequence[str],
    *,
    exchange: bool | None = None,
) -> None:
    """Read ``pieces``; see [Note: readers]. Every rank must call this.

    Args:
        reader: The checkpoint.
        pieces: What this rank needs.
        ranks: All ranks.
        hosts: Where they are.
        exchange: Whether a block that several ranks need is read by one, which sends it to the
            others, or all of them read it; None to find out.

    Raises:
        CorruptCheckpointError: If a block that this rank has read is damaged. The other ranks
            have to be told; what the pieces hold then is undefined.
    """
    whole = [piece for piece in pieces if not piece.is_torn]
    torn = [piece for piece in pieces if piece.is_torn]
    block_index = BlockIndex(reader.manifest)
    readers = choose_readers(block_index, whole, ranks, in_parts=True)
    exchanging = _whether_to_exchange(exchange, hosts, reader)
    units = OwnUnits(
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
            alone = pool.submit(_failure_of_reading, units, torn)
            try:
                exchange_blocks(whole, readers, block_index, ranks, units.read_to_send)
            except BaseException:
                units.stop()
                raise
            failure = alone.result()
    else:
        failure = _failure_of_reading(units, torn)
    units.sums.check(failure, ranks)
    if failure is not None:
        raise failure


def _failure_of_reading(units: OwnUnits, torn: Sequence[Piece]) -> Exception | None:
    try:
        units.read_all()
        in_threads(partial(read_torn, units.reader), torn)
    except Exception as error:
        return error
    return None


def check(reader: Reader, pieces: Sequence[Piece], ranks: Ranks) -> None:
    """Read and check what ``pieces`` need, changing nothing. Every rank must call this.

    Raises:
        CorruptCheckpointError: If a block that this rank has read is damaged.
    """
    block_index = BlockIndex(reader.manifest)
    readers = choose_readers(block_index, pieces, ranks, in_parts=False)
    own = np.flatnonzero(readers.reader == ranks.rank).tolist()
    most = max(1, CHUNK_NBYTES // block_index.block_nbytes)
    in_threads(reader.check_blocks, block_index.chunks(own, most))


def _whether_to_exchange(wanted: bool | None, hosts: Sequence[str], reader: Reader) -> bool:
    """Return whether ranks send each other what several of them need.

    On one host the page cache does that for them, and faster.

    Args:
        wanted: What the caller says; None to find out.
        hosts: The host of each rank.
        reader: The checkpoint.
    """
    if len(hosts) == 1:
        return False
    if wanted is not None:
        return wanted
    return len(set(hosts)) > 1 or not reader.has_page_cache
