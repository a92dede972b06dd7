from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from vescale_ckpt._crc import PartialSums, append_zeros, combine, register
from vescale_ckpt._read import share
from vescale_ckpt._runs import runs_of
from vescale_dtensor import Box


@given(content=st.binary(max_size=50), zeros=st.integers(0, 5000))
def test_zeros_are_appended_to_a_register_without_reading_them(content: bytes, zeros: int) -> None:
    words = np.array([register(content)], np.uint32)
    (result,) = append_zeros(words, np.array([zeros])).tolist()
    assert result == register(content + bytes(zeros))


@given(data=st.data(), content=st.binary(max_size=200), block_nbytes=st.integers(1, 64))
def test_pieces_written_by_many_in_any_order_give_the_checksums_of_the_file(
    data: st.DataObject, content: bytes, block_nbytes: int
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=8))
    edges = sorted({0, len(content), *cuts})
    pieces = data.draw(st.permutations(list(itertools.pairwise(edges))))
    writers = [PartialSums(len(content), block_nbytes) for _ in range(3)]
    for number, (start, stop) in enumerate(pieces):
        writers[number % 3].add(start, memoryview(content)[start:stop])
    expected = [
        zlib.crc32(content[start : start + block_nbytes])
        for start in range(0, len(content), block_nbytes)
    ]
    assert combine(len(content), block_nbytes, [w.folded() for w in writers]) == expected
    assert sum(writer.written_nbytes for writer in writers) == len(content)


def test_a_byte_that_nobody_wrote_shows_in_the_checksum() -> None:
    content = bytes(range(1, 100))
    writer = PartialSums(len(content), 64)
    writer.add(0, memoryview(content)[:70])
    writer.add(71, memoryview(content)[71:])
    assert combine(len(content), 64, [writer.folded()])[1] != zlib.crc32(content[64:])


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    inner = tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offset, strict=True))
    return shape, Box(offset, inner)


@settings(max_examples=300)
@given(shape_and_box=boxes(), start=st.integers(0, 7))
def test_runs_cut_a_box_out_of_the_bytes_of_the_tensor(
    shape_and_box: tuple[tuple[int, ...], Box], start: int
) -> None:
    shape, box = shape_and_box
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    content = bytes(start) + whole.numpy().tobytes()
    runs = runs_of(shape, box, 2, start)
    expected = whole[box.slices].contiguous().numpy().tobytes()
    assert runs.total_nbytes == len(expected)
    found = b"".join(content[o : o + runs.nbytes] for o in runs.offsets.tolist())
    assert found == expected
    half = len(expected) // 2
    located = [
        content[offset : offset + upper - lower]
        for offset, lower, upper in runs.locate(half, len(expected) - half)
    ]
    assert b"".join(located) == expected[half:]


def test_adjacent_rows_are_one_run() -> None:
    assert len(runs_of((10, 4, 5), Box((2, 0, 0), (7, 4, 5)), 4).offsets) == 1
    assert len(runs_of((10, 4, 5), Box((2, 1, 0), (7, 2, 5)), 4).offsets) == 7


@pytest.mark.parametrize("nbytes", [0, 1, 100, (1 << 20) + 1])
def test_a_file_without_pieces_has_the_checksums_of_zeros(nbytes: int) -> None:
    expected = [zlib.crc32(bytes(min(1 << 20, nbytes - i))) for i in range(0, nbytes, 1 << 20)]
    assert combine(nbytes, 1 << 20, []) == expected


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    num_ranks=st.integers(1, 6),
    block_nbytes=st.sampled_from([1 << 20, 3 << 20, 4 << 20]),
)
def test_ranks_share_the_blocks_to_check(
    sizes: list[int], num_ranks: int, block_nbytes: int
) -> None:
    intervals = {f"file{i}": [(2 * i, 2 * i + size)] for i, size in enumerate(sizes)}
    shares = [list(share(intervals, block_nbytes, r, num_ranks)) for r in range(num_ranks)]
    checked = [(b.file, n) for blocks in shares for b in blocks for n in range(b.start, b.stop)]
    expected = [
        (file, n) for file, spans in intervals.items() for a, b in spans for n in range(a, b)
    ]
    assert checked == expected
    counts = [sum(b.stop - b.start for b in blocks) for blocks in shares]
    assert max(counts) - min(counts) <= 1
