from __future__ import annotations

import pytest
import torch

from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._model.inputs import batch_dims, has_rows_first
from vescale_parallel._pipeline.microbatches import split_batch

X, Y = torch.arange(24.0).view(4, 6), torch.arange(6)


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


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"divide into 4 micro-batches .*got 6 rows"):
        split_batch((X,), {"y": Y}, 4, (Rows(1), Rows(0)))
    with pytest.raises(ValueError, match="got None rows"):
        split_batch((1,), {}, 2)
