"""Activations that cross the border of a region: who has what, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_parallel._proof import run_in_threads
from vescale_parallel._tp_boundaries import Boundary
from vescale_parallel._tp_ranks import FakeRanks, Meeting, ThreadRanks, part_sizes

LENGTH = 5  # over two ranks 3 and 2


def test_a_tensor_that_several_layers_read_enters_once() -> None:
    boundary = Boundary(FakeRanks(2))
    x_BSF = torch.randn(2, 4, 3, requires_grad=True)
    entered = boundary.enter(x_BSF, None, "blocks")
    assert boundary.enter(x_BSF, None, "blocks") is entered
    assert boundary.enter(x_BSF.clone(), None, "blocks") is not entered
    entered = boundary.enter(x_BSF, None, "blocks")
    boundary.leave(entered, None, "blocks")
    assert boundary.enter(x_BSF, None, "blocks") is not entered


def test_a_tensor_that_was_written_to_enters_again() -> None:
    boundary = Boundary(FakeRanks(2))
    x_BSF = torch.randn(2, 4, 3)
    entered = boundary.enter(x_BSF, 1, "blocks")
    x_BSF.add_(1)
    assert boundary.enter(x_BSF, 1, "blocks") is not entered


def crossed(rank: int, meeting: Meeting, whole_BSF: Tensor) -> tuple[Tensor, Tensor]:
    """Cut, gather, scale by the rank, sum and cut, gather: the sum of all scales."""
    boundary = Boundary(ThreadRanks(meeting, rank))
    x_BSF = whole_BSF.clone().requires_grad_()
    part_BSF = boundary.split(x_BSF, 1, "blocks")
    assert part_BSF.shape[1] == part_sizes(LENGTH, 2)[rank]
    inside_BSF = boundary.enter(part_BSF, 1, "blocks")
    assert torch.equal(inside_BSF, whole_BSF)
    left_BSF = boundary.leave(inside_BSF * (rank + 1), 1, "blocks")
    y_BSF = boundary.gather(left_BSF, 1, "blocks")
    (y_BSF * whole_BSF).sum().backward()
    assert x_BSF.grad is not None
    return y_BSF.detach(), x_BSF.grad


def test_uneven_sequences_come_back_whole_with_the_gradients_of_one_device() -> None:
    whole_BSF = torch.randn(2, LENGTH, 3, dtype=torch.float64)
    for y_BSF, grad_BSF in run_in_threads(2, lambda r, m: crossed(r, m, whole_BSF)):
        assert torch.equal(y_BSF, whole_BSF * 1 + whole_BSF * 2)
        assert torch.equal(grad_BSF, whole_BSF * 1 + whole_BSF * 2)


def test_a_pipeline_needs_sequences_that_divide() -> None:
    boundary = Boundary(FakeRanks(2), even=True)
    with pytest.raises(ValueError, match="got 5; the nearest are 4 and 6"):
        boundary.split(torch.zeros(1, LENGTH, 2), 1, "blocks")
    assert boundary.split(torch.zeros(1, 4, 2), 1, "blocks").shape == (1, 2, 2)


def test_a_rank_that_fails_stops_the_others() -> None:
    def fails(rank: int, meeting: Meeting) -> None:
        if rank:
            raise RuntimeError("rank 1 gave up")
        ThreadRanks(meeting, rank).all_reduce(torch.zeros(()))

    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        run_in_threads(2, fails)
