"""How the shards of parameters are packed for one collective, and unpacked."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from vescale_parallel._data_parallel.shard_rows import GatheredRows, RowLayout, Shape, release

# Shape, dim that is sharded, whether it lies transposed in memory.
CASES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), min_size=2, max_size=3), st.integers(0, 1), st.booleans()
    ),
    min_size=1,
    max_size=4,
)


def _shapes(cases: list[tuple[list[int], int, bool]]) -> list[Shape]:
    return [Shape(torch.Size(shape), dim) for shape, dim, _ in cases]


def _wholes(cases: list[tuple[list[int], int, bool]]) -> list[Tensor]:
    wholes: list[Tensor] = []
    for index, (shape, _, is_transposed) in enumerate(cases):
        if is_transposed:
            flipped = (*shape[:-2], shape[-1], shape[-2])
            wholes.append(_counted(flipped, index).transpose(-1, -2))
        else:
            wholes.append(_counted(tuple(shape), index))
    return wholes


def _counted(shape: tuple[int, ...], index: int) -> Tensor:
    return (torch.arange(1.0, torch.Size(shape).numel() + 1) + 1000 * index).view(shape)


def _chunks(whole: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return the parts of torch.chunk, and empty ones for the ranks it leaves without."""
    step = -(-whole.shape[dim] // ranks)
    starts = [min(rank * step, whole.shape[dim]) for rank in range(ranks + 1)]
    return [whole.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]


@settings(deadline=None)
@given(CASES, st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_rows_of_all_ranks_are_joined_to_the_wholes(
    cases: list[tuple[list[int], int, bool]], ranks: int, dtype: torch.dtype
) -> None:
    shapes, wholes = _shapes(cases), _wholes(cases)
    targets = [torch.full(whole.shape, -1.0, dtype=dtype) for whole in wholes]
    of_ranks: list[GatheredRows] = []
    for rank in range(ranks):
        own = [
            _chunks(w, ranks, s.shard_dim or 0)[rank] for w, s in zip(wholes, shapes, strict=True)
        ]
        of_ranks.append(GatheredRows(shapes, own, targets, ranks, 3))
    for rows in of_ranks:
        rows.pack()
    last = of_ranks[-1]
    last.rows.copy_(torch.stack([rows.sent for rows in of_ranks]))
    last.unpack()
    assert all(
        torch.equal(target, whole.to(dtype)) for target, whole in zip(targets, wholes, strict=True)
    )
    assert torch.equal(last.tags, last.expected_tags)


@settings(deadline=None)
@given(CASES, st.integers(1, 5), st.sampled_from([torch.float32, torch.float64]))
def test_row_r_of_gradients_is_the_part_of_rank_r(
    cases: list[tuple[list[int], int, bool]], ranks: int, dtype: torch.dtype
) -> None:
    shapes, wholes = _shapes(cases), _wholes(cases)
    layout = RowLayout(tuple(shapes), ranks, 4)
    rows = torch.zeros(ranks, layout.row, dtype=dtype)
    _write(layout, rows, wholes)
    for rank in range(ranks):
        own = [
            _chunks(w, ranks, s.shard_dim or 0)[rank] for w, s in zip(wholes, shapes, strict=True)
        ]
        found = layout.unpack(rows[rank], [part.shape for part in own])
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, own, strict=True))
        # What is padded must not count in the sum over ranks.
        assert float(rows[rank].double().sum()) == sum(float(p.double().sum()) for p in own)


def _write(layout: RowLayout, rows: Tensor, wholes: list[Tensor]) -> None:
    for index, targets in enumerate(layout.pieces_of_rows(rows)):
        for target, source in zip(
            targets, layout.pieces_of_whole(index, wholes[index]), strict=True
        ):
            target.copy_(source)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [31, 127, 128])
def test_rows_are_multiples_of_128_bytes(itemsize: int, width: int) -> None:
    shapes = (Shape(torch.Size((8, width)), 0), Shape(torch.Size((3,)), 0))
    layout = RowLayout(shapes, 2, itemsize)
    assert layout.row * itemsize % 128 == 0
    used = 4 * width + 2
    assert used < layout.row <= used + 128 // itemsize


@pytest.mark.parametrize("multiple", [1, 3, 64, 1000])
def test_a_row_divides_over_the_ranks_that_add_their_copies(multiple: int) -> None:
    layout = RowLayout((Shape(torch.Size((8, 31)), None),), 1, 4, multiple)
    assert layout.row % multiple == layout.row % 32 == 0
    assert layout.row >= 8 * 31 + 1


def test_copies_are_one_row_scalars_among_them() -> None:
    wholes = [torch.ones(2, 3), torch.tensor(5.0), torch.empty(0, 3), torch.arange(4.0)]
    layout = RowLayout(tuple(Shape(whole.shape, None) for whole in wholes), 1, 4)
    rows = torch.zeros(1, layout.row)
    _write(layout, rows, wholes)
    found = layout.unpack(rows[0], [whole.shape for whole in wholes])
    assert all(torch.equal(a, b) for a, b in zip(found, wholes, strict=True))


def test_buffers_have_memory_only_between_packing_and_their_release() -> None:
    whole = torch.zeros(4, 3)
    release(whole)
    rows = GatheredRows([Shape(whole.shape, 0)], [torch.ones(2, 3)], [whole], 2, 0)

    def sizes() -> list[bool]:
        return [t.untyped_storage().size() > 0 for t in (whole, rows.sent, rows.rows)]

    assert sizes() == [False, False, False]
    rows.pack()  # what is filled takes memory when it is: others compute meanwhile
    assert sizes() == [False, True, True]
    rows.unpack()
    assert sizes() == [True, True, True]
    rows.release()
    assert sizes() == [True, False, False]
