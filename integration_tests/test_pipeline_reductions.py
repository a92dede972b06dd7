"""Data-parallel pipelines, whose stages are reduced one after the other: one device's numbers."""

from __future__ import annotations

import pytest

from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints
from .programs import Plain, Run, right

INTERLEAVED: Constraints = {
    PP: 2, PARTS: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2, DP: 2, ZERO: 2,
}  # fmt: skip


def training(run: Run) -> None:
    run.train(Plain())


@pytest.mark.by_day("2")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_pipelines_have_the_numbers_of_one_device(world4: World, zero: int) -> None:
    right(world4, training, {**INTERLEAVED, ZERO: zero})
