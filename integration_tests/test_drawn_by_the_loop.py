"""Random numbers that a loop draws for its own rows are the same on all ranks, which says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import DP, ZERO, Constraints, make_plan

ROWS, WIDTH = 16, 4
Draw = Callable[[int], tuple[Tensor, Tensor]]


class Denoiser(nn.Module):
    """Predicts noise; keeps what a mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH + 1, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, step: Tensor, noise: Tensor, mask: Tensor) -> Tensor:
        given = torch.cat([x, step[:, None] / 20], 1)
        return F.mse_loss(self.down(self.up(given).tanh()) * mask, noise)


def for_own_rows(rank: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (ROWS // 2,)), torch.randn(ROWS // 2, WIDTH)


def for_all_rows(rank: int) -> tuple[Tensor, Tensor]:
    step, noise = torch.randint(0, 20, (ROWS,)), torch.randn(ROWS, WIDTH)
    return step.chunk(2)[rank], noise.chunk(2)[rank]


def constant(rank: int) -> tuple[Tensor, Tensor]:
    return torch.full((ROWS // 2,), 7), for_all_rows(rank)[1]


def said(draw: Draw, constraints: Constraints) -> list[str]:
    torch.manual_seed(0)
    model = vescale.parallelize(make_plan(constraints), Denoiser())
    rank = vescale.data_parallel_rank(model)
    mask = torch.ones(ROWS // 2, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(ROWS, WIDTH, generator=generator).chunk(2)[rank]
            step, noise = draw(rank)
            model(x + noise, step, noise, mask).backward()
    return [str(each.message) for each in caught]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_steps_that_a_loop_draws_for_its_own_rows_are_named_once(
    world2: World, stage: int
) -> None:
    for messages in world2.run(said, for_own_rows, {DP: 2, ZERO: stage}):
        (message,) = messages
        assert "argument [1] (8,) is the same on all data-parallel ranks and another" in message


@pytest.mark.parametrize("draw", [for_all_rows, constant])
def test_what_is_of_all_rows_or_of_none_says_nothing(world2: World, draw: Draw) -> None:
    assert world2.run(said, draw, {DP: 2}) == [[], []]
