"""A batch in equal parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from vescale_parallel._pipeline.microbatches import split_batch

IDS = torch.arange(12).view(6, 2)


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


@pytest.mark.parametrize("batch", [(), (3, "text"), (torch.tensor(1.0),)])
def test_a_batch_without_rows_is_refused(batch: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="got None rows"):
        split_batch(batch, {}, 2)
