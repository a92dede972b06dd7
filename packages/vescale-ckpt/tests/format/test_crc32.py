from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st

from vescale_ckpt._format.byte_ranges import byte_ranges_of
from vescale_ckpt._format.crc32 import PartialBlockCrcs, append_zeros, checksums, register
from vescale_dtensor import Box


@given(content=st.binary(max_size=50), zeros=st.integers(0, 5000))
def test_zeros_are_appended_to_a_register_without_reading_them(content: bytes, zeros: int) -> None:
    words = np.array([register(content)], np.uint32)
    (result,) = append_zeros(words, np.array([zeros])).tolist()
    assert result == register(content + bytes(zeros))


def combined(registers: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    return np.bitwise_xor.reduce(registers, axis=0)


@given(data=st.data(), content=st.binary(max_size=200), block_nbytes=st.integers(1, 64))
def test_pieces_written_by_many_in_any_order_give_the_checksums_of_the_file(
    data: st.DataObject, content: bytes, block_nbytes: int
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=8))
    edges = sorted({0, len(content), *cuts})
    pieces = data.draw(st.permutations(list(itertools.pairwise(edges))))
    writers = [PartialBlockCrcs(len(content), block_nbytes) for _ in range(3)]
    for number, (start, stop) in enumerate(pieces):
        writers[number % 3].add(start, memoryview(content)[start:stop])
    expected = [
        zlib.crc32(content[start : start + block_nbytes])
        for start in range(0, len(content), block_nbytes)
    ]
    assert (
        checksums(len(content), block_nbytes, combined([w.folded() for w in writers])) == expected
    )
    assert sum(writer.written_nbytes for writer in writers) == len(content)


def test_a_byte_that_nobody_wrote_shows_in_the_checksum() -> None:
    content = bytes(range(1, 100))
    writer = PartialBlockCrcs(len(content), 64)
    writer.add(0, memoryview(content)[:70])
    writer.add(71, memoryview(content)[71:])
    assert checksums(len(content), 64, writer.folded())[1] != zlib.crc32(content[64:])


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
    runs = byte_ranges_of(shape, box, 2, start)
    expected = whole[box.slices].contiguous().numpy().tobytes()
    assert runs.total_nbytes == len(expected)
    found = b"".join(content[o : o + runs.nbytes] for o in runs.offsets())
    assert found == expected
    half = len(expected) // 2
    located = [
        content[offset : offset + upper - lower]
        for offset, lower, upper in runs.locate(half, len(expected) - half)
    ]
    assert b"".join(located) == expected[half:]


def test_adjacent_rows_are_one_run() -> None:
    assert byte_ranges_of((10, 4, 5), Box((2, 0, 0), (7, 4, 5)), 4).num_ranges == 1
    assert byte_ranges_of((10, 4, 5), Box((2, 1, 0), (7, 2, 5)), 4).num_ranges == 7


@pytest.mark.parametrize("nbytes", [0, 1, 100, (1 << 20) + 1])
def test_a_file_without_pieces_has_the_checksums_of_zeros(nbytes: int) -> None:
    expected = [zlib.crc32(bytes(min(1 << 20, nbytes - i))) for i in range(0, nbytes, 1 << 20)]
    assert checksums(nbytes, 1 << 20, PartialBlockCrcs(nbytes, 1 << 20).folded()) == expected
