"""Stacked experts that take as many rows each, on several ranks: as on one device."""

from __future__ import annotations

import pytest

from vescale_testing import World

from .listed_experts import BATCHED
from .plans import DP, EP, TP, ZERO
from .test_listed_experts import check


@pytest.mark.by_day("AllTokens")
@pytest.mark.slow
@pytest.mark.parametrize("layer", BATCHED)
def test_two_ranks_share_experts_that_take_as_many_rows_each(world2: World, layer: str) -> None:
    check(world2, {DP: 2, EP: 2, ZERO: 1}, layer)


@pytest.mark.by_day("Capacity")
@pytest.mark.slow
@pytest.mark.parametrize("layer", BATCHED)
def test_they_are_sharded_beside(world4: World, layer: str) -> None:
    check(world4, {DP: 4, EP: 2, ZERO: 3, "recompute": "full"}, layer)
    check(world4, {DP: 2, EP: 2, TP: 2}, layer)
