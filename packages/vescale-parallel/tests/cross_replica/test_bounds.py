"""Bounds of rows: what they say, how they are cut, and how they are told from other integers."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from vescale_parallel._cross_replica.batches.small_batches import some_rows
from vescale_parallel._cross_replica.dims.bounds import (
    Bounds,
    Kind,
    RowsByBounds,
    bounds_of,
    bounds_within,
    edges_of,
    num_rows_of_bounds,
)
from vescale_parallel._cross_replica.dims.find_bounds import bounded_dims
from vescale_parallel._cross_replica.dims.packed_rows import PackedRowsError

KINDS: tuple[Kind, ...] = get_args(Kind)
LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(LENGTHS, st.sampled_from(KINDS), st.data())
def test_parts_of_bounds_are_bounds_of_parts(lengths: list[int], kind: Kind, data: Any) -> None:
    if kind == "owners":  # the last row owns something, or nobody knows of it
        lengths = [max(length, 1) for length in lengths]
    bounds, total = torch.tensor(bounds_of(lengths, kind)), sum(lengths)
    edges = edges_of(bounds.tolist(), kind, total)
    assert edges is not None
    assert [stop - start for start, stop in itertools.pairwise(edges)] == lengths
    assert num_rows_of_bounds(bounds, kind) == len(lengths)
    start = data.draw(st.integers(0, len(lengths) - 1))
    size = data.draw(st.integers(1, len(lengths) - start))
    part = bounds_within(bounds, kind, start, size)
    assert part.tolist() == bounds_of(lengths[start : start + size], kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 2], "starts"), ([0, 3, 2], "starts"), ([0, 2], "ends"), ([0, 2], "both")],
)
def test_what_does_not_rise_from_0_to_the_end_is_none(values: list[int], kind: Kind) -> None:
    assert edges_of(values, kind, 5) is None


def readings(*args: Any) -> list[dict[int, Any]]:
    return [dict(dims) for dims in bounded_dims(args, {})]


def test_offsets_are_of_what_is_as_long_as_each_other() -> None:
    text, weights, labels = torch.arange(9) % 5, torch.rand(9), torch.tensor([3, 1, 2])
    offsets = torch.tensor([0, 2, 6])
    rows = RowsByBounds(1, "starts")
    found = readings(text, offsets, weights, labels)
    assert found[0] == {0: rows, 1: Bounds(1, 0, "starts"), 2: rows}
    assert rows.lengths([text, offsets], 0) == (2, 4, 3)


def test_lists_have_bounds_one_by_one() -> None:
    ids = [torch.arange(n) + 1 for n in (5, 4, 6)]
    offsets = [torch.tensor([0, n]) for n in (1, 2, 3)]
    packed = {i: RowsByBounds(i - 3, "starts") for i in (3, 4, 5)}
    expected = {i: Bounds(i, 0, "starts") for i in (0, 1, 2)} | packed
    assert expected in readings(offsets, ids, torch.rand(2, 3))
    tables = {i: RowsByBounds(0, "starts", i - 1) for i in (1, 2, 3)}
    assert {0: Bounds(0, 1, "starts"), **tables} in readings(torch.stack(offsets), ids)


def test_as_many_elements_as_rows_may_be_packed_or_not() -> None:
    text, offsets, labels = torch.tensor([4, 2, 7]), torch.arange(3), torch.tensor([1, 0, 2])
    found = readings(text, offsets, labels)
    bounds = {1: Bounds(1, 0, "starts")}
    assert {0: RowsByBounds(1, "starts"), **bounds} in found
    assert bounds in found


def test_columns_of_a_batch_have_none() -> None:
    assert not readings(torch.rand(4, 3), torch.tensor([2, 0, 1, 3]))
    assert not readings(torch.randint(0, 9, (4, 6)), torch.ones(4, 6, dtype=torch.long))


def test_a_call_that_does_not_fit_says_so() -> None:
    rows = RowsByBounds(1, "starts")
    with pytest.raises(PackedRowsError, match=r"has the starts in another one, of 3 elements"):
        rows.lengths([torch.arange(3), torch.tensor([0, 5])], 0)
    # As many as rows: not packed, though it was as long as what is, in an earlier call.
    assert rows.lengths([torch.arange(2), torch.tensor([0, 5])], 0) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_small_batches_have_rows_of_one_length_with_bounds_of_their_own(kind: Kind) -> None:
    lengths = [2, 1, 4]
    bounds = torch.tensor(bounds_of(lengths, kind))
    text, labels = torch.arange(7), torch.tensor([5, 6, 5])
    told = {0: RowsByBounds(1, kind), 1: 0 if kind == "lengths" else Bounds(1, 0, kind)}
    call: Any = (text, bounds, labels), {}
    batches: Any = some_rows(call, 3, uneven=False, dims=(*told.items(),))
    shapes = [[len(x) for x in (args[0], args[2])] for args, _ in batches]
    assert shapes == [[16, 4], [8, 2], [8, 2]]
    for (_, made, _), num_rows in zip((args for args, _ in batches), (4, 2, 2), strict=True):
        assert made.tolist() == bounds_of([4] * num_rows, kind)
    whole, first, second = (args[0] for args, _ in batches)
    assert torch.equal(whole, torch.cat([first, second]))
    assert not _alike(whole.view(4, 4))


def test_small_batches_may_have_short_rows() -> None:
    call: Any = (torch.arange(7), torch.tensor([0, 2, 3])), {}
    told = (0, RowsByBounds(1, "starts")), (1, Bounds(1, 0, "starts"))
    batches: Any = some_rows(call, 3, uneven=False, dims=told, has_short=True)
    assert [args[1].tolist() for args, _ in batches] == [[0, 4, 8, 10], [0, 4], [0, 2]]


def _alike(rows: Tensor) -> bool:
    return any(torch.equal(rows[0], row) for row in rows[1:])
