"""How verify puts ranks' tensors together."""

import pytest
import torch

from vescale._verify.placements import best_match, match_in_any_order


@pytest.mark.parametrize("rows_of_first", [7, 9, 12])
def test_an_experts_tokens_of_two_slices_are_compared_in_any_order(rows_of_first: int) -> None:
    """Two ranks have some of the tokens each, with half of the features; 12 looks like slices."""
    generator = torch.Generator().manual_seed(0)
    whole_RF = torch.randn(21, 6, generator=generator)
    of_slices = whole_RF[torch.randperm(21, generator=generator)].split(
        [rows_of_first, 21 - rows_of_first]
    )
    ranks = {
        (cp, tp): features
        for cp, rows in enumerate(of_slices)
        for tp, features in enumerate(rows.chunk(2, 1))
    }
    match = best_match(whole_RF, ranks, bound=0.0)
    assert match is not None
    assert match.error == 0.0
    assert match.placements.endswith("over cp along dim 0 in another order")
    ranks[1, 1] = ranks[1, 1] + 1
    match = best_match(whole_RF, ranks, bound=0.0)
    assert match is not None
    assert match.error > 0.1


def test_rows_in_another_order_are_paired_although_rounding_swaps_them() -> None:
    """By the sum that they are sorted by, two rows that differ are nearly the same."""
    direction = torch.linspace(1.0, 2.0, 2, dtype=torch.float64).cos()
    first = torch.tensor([direction[1], -direction[0]])  # of which the sum is nothing
    whole = torch.stack([first, -first, torch.tensor([5.0, 5.0])])
    off = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]) * 1e-3
    found = (whole + off)[[1, 0, 2]]
    swapped = (whole - off)[[1, 0, 2]]
    for rows in (found, swapped):
        match = best_match(whole, {(0, 0): rows[:1], (1, 0): rows[1:]}, bound=2e-3)
        assert match is not None
        assert match.placements.endswith("in another order")
        assert match.error < 2e-3


def test_tokens_of_shards_in_any_order() -> None:
    """An expert's are sorted by choice, then by token, of all rows and of a rank's."""
    whole = torch.randn(12, 4, dtype=torch.float64)
    first, second = whole[[0, 3, 4, 7, 8]], whole[[1, 2, 5, 6, 9, 10, 11]]
    match = match_in_any_order(whole, {0: {(0, 0): first}, 1: {(0, 0): second}}, 0.0)
    assert match is not None
    assert match.error == 0.0
    # Features over tensor-parallel ranks, slices of sequences over others.
    halves = {
        (cp, tp): x[:, 2 * tp : 2 * tp + 2]
        for cp, x in enumerate((first, second))
        for tp in (0, 1)
    }
    match = match_in_any_order(whole, {0: halves}, 0.0)
    assert match is not None
    assert match.error == 0.0
    weights = {at: {(0, 0): x[:, 0]} for at, x in enumerate((second, first))}
    match = match_in_any_order(whole[:, 0], weights, 0.0)
    assert match is not None
    assert match.error == 0.0

    other = second.clone()
    other[3, 1] += 0.5
    match = match_in_any_order(whole, {0: {(0, 0): first}, 1: {(0, 0): other}}, 1e-12)
    assert match is not None
    assert match.error > 0.1
    assert match_in_any_order(whole, {0: {(0, 0): first}}, 0.0) is None


def test_heads_in_a_dim_with_many_tokens_are_shards_of_each() -> None:
    whole = torch.randn(8 * 24 * 4, 6, dtype=torch.float64)  # rows, tokens and heads
    by_token = whole.unflatten(0, (-1, 4))
    ranks = {(0, tp): by_token[:, 2 * tp : 2 * tp + 2].flatten(0, 1) for tp in (0, 1)}
    match = best_match(whole, ranks, 0.0)
    assert match is not None
    assert match.error == 0.0
