"""A batch in equal parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._model.inputs import batch_dims, has_rows_first
from vescale_parallel._pipeline.microbatches import split_batch

IDS = torch.arange(12).view(6, 2)
X, Y = torch.arange(24.0).view(4, 6), torch.arange(6)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_parts_put_together_are_the_batch(num_parts: int) -> None:
    parts = split_batch((IDS,), {"labels": IDS + 100}, num_parts)
    assert len(parts) == num_parts
    assert torch.equal(torch.cat([args[0] for args, _ in parts]), IDS)
    assert torch.equal(torch.cat([kwargs["labels"] for _, kwargs in parts]), IDS + 100)
    assert {args[0].shape[0] for args, _ in parts} == {6 // num_parts}


def test_what_has_no_rows_goes_to_every_part() -> None:
    mask, scale = torch.ones(2, 2), torch.tensor(0.5)
    batch: dict[str, Any] = {"mask": mask, "scale": scale, "mode": "train", "none": None}
    for _, kwargs in split_batch((IDS,), batch, 3):
        assert kwargs["mask"] is mask
        assert kwargs["scale"] is scale
        assert kwargs["mode"] == "train"
        assert kwargs["none"] is None


def test_structures_are_opened() -> None:
    batch: Any = default_collate([{"pair": (row, row + 1)} for row in IDS])
    first, second = split_batch((batch,), {}, 2)
    one, other = first[0][0]["pair"], second[0][0]["pair"]
    assert isinstance(one[0], Tensor)
    assert torch.equal(one[0], IDS[:3])
    assert torch.equal(other[1], IDS[3:] + 1)


def test_a_batch_whose_rows_do_not_divide_is_refused() -> None:
    told = r"rows divide into 4 micro-batches \(pipeline_parallel.microbatches\), got 6 rows"
    with pytest.raises(ValueError, match=told):
        split_batch((IDS,), {}, 4)


@pytest.mark.parametrize(("dim", "outermost"), [(0, True), (1, True), (1, False)])
def test_parts_may_have_one_row_more(dim: int, outermost: bool) -> None:
    """As torch cuts a tensor; rows of a folded dim with what else is in it."""
    batch = torch.arange(7 * 6).view(7, 6)
    rows = batch
    if dim == 1:  # (time x batch) or (batch x time), two times
        rows = torch.stack([batch, batch + 100], 1 if outermost else 0).reshape(-1, 6).T
    parts = split_batch((rows, batch), {}, 4, (Rows(dim, outermost), Rows(0)), may_be_uneven=True)
    for ((part, plain), _), expected in zip(parts, batch.tensor_split(4), strict=True):
        assert torch.equal(plain, expected)
        if dim == 1:
            expected = torch.stack([expected, expected + 100], 1 if outermost else 0)
            expected = expected.reshape(-1, 6).T
        assert torch.equal(part, expected)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_of_fewer_rows_than_parts_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 4 rows, .* got {rows} rows; leave .* out"):
        split_batch((IDS[:rows],), {}, 4, may_be_uneven=True)
    with pytest.raises(ValueError, match=rf"divide into 4 micro-batches .* got {rows} rows"):
        split_batch((IDS[:rows],), {}, 4)


@pytest.mark.parametrize("batch", [(), (3, "text"), (torch.tensor(1.0),)])
def test_a_batch_without_rows_is_refused(batch: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="got None rows"):
        split_batch(batch, {}, 2)


def test_rows_are_first_in_every_tensor_as_long_as_the_first_one() -> None:
    batch = (torch.tensor(0.5), torch.ones(4, 3), {"y": torch.ones(4), "mask": torch.ones(3, 3)})
    assert batch_dims(batch) == (None, 0, 0, None)
    assert not has_rows_first(batch)
    assert has_rows_first((torch.ones(4, 3), torch.ones(4), 7))
    assert not has_rows_first((1, torch.tensor(2.0)))


def test_without_more_knowledge_a_batch_is_cut_along_its_first_dim() -> None:
    (first, _), (second, _) = split_batch((X, "mean", torch.tensor(1.0)), {}, 2)
    assert torch.equal(torch.cat((first[0], second[0])), X)
    assert first[1:] == second[1:] == ("mean", torch.tensor(1.0))


def test_a_batch_is_cut_where_its_rows_were_seen() -> None:
    parts = split_batch((X,), {"y": Y}, 3, (Rows(1), Rows(0)))
    assert torch.equal(torch.cat([args[0] for args, _ in parts], 1), X)
    assert torch.equal(torch.cat([kwargs["y"] for _, kwargs in parts]), Y)


def test_rows_innermost_in_a_dim_are_cut_in_every_step_of_time() -> None:
    folded = X.flatten()  # (4 steps x 6 rows)
    parts = split_batch((folded,), {"y": Y}, 2, (Rows(0, outermost=False), Rows(0)))
    assert torch.equal(parts[1][0][0], X[:, 3:].flatten())


def test_rows_that_were_seen_and_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"divide into 4 micro-batches .*got 6 rows"):
        split_batch((X,), {"y": Y}, 4, (Rows(1), Rows(0)))
