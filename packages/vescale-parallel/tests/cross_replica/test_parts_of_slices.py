"""What modules that see whole sequences return where others have parts of a rank's slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.shown import Shown, ShownModules
from vescale_parallel._cross_replica.context.slices import ContextThreads, SequenceSlices
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._torch_private import unseen_functions
from vescale_parallel._trace.extents import Extent
from vescale_parallel._verify.threads import run_in_threads


def test_a_part_of_a_slice_is_of_positions_of_the_sequence() -> None:
    """Of 13 positions, ranks of a ring have (0, 4) and (10, 13), or (4, 7) and (7, 10)."""
    extent = Extent(13, ((0, 4), (10, 13)))
    parts = [extent.within(0, 4), extent.within(4, 7), extent.within(2, 6), extent.within(3, 3)]
    assert [part.ranges for part in parts] == [((0, 4),), ((10, 13),), ((2, 4), (10, 12)), ()]


class EndsIn(nn.Module):
    """Attention that is written out, and does something with what its last layer returns."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.end = nn.Linear(4, 4), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.out(x))


def parted(end: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a shown module makes of 6 positions of 12, of which its layer returns 3."""
    slices = SequenceSlices.over(12, 2, "all_to_all")
    now = Shown(frozenset({""}), frozenset({"out"}), {("", 0, 3): (2, 12, 4)})

    def on_rank(rank: int, threads: ThreadExchange) -> Tensor:
        module, ranks = EndsIn(end), ContextThreads(threads, rank)
        own = module.out.forward
        module.out.forward = lambda input: own(input)[:, 3:]
        shown = ShownModules(ranks, lambda: (now, slices), lambda length: (length // 2, length))
        shown.show(module, now, besides={""})
        return shown.call("", module.forward, (torch.ones(2, 6, 4),), {})

    return run_in_threads(2, on_rank)[0]


def test_shown_modules_return_parts_of_slices() -> None:
    assert parted(lambda x: 2 * x.relu() + torch.ones(4)).shape == (2, 3, 4)


def doubled_unseen(x: Tensor) -> Tensor:
    """Compute where torch hands operators the tensor without asking its class for functions."""
    with unseen_functions():
        return x * 2


def test_operators_are_not_given_parts_for_the_whole() -> None:
    with pytest.raises(ValueError, match=r"takes the whole of .* ranks have parts, too"):
        parted(doubled_unseen)


@pytest.mark.parametrize(
    ("end", "name"),
    [
        (lambda x: x.flip(1), "flip"),
        (lambda x: x[:, :1], "__getitem__"),
        (lambda x: x - x.mean(1, keepdim=True), "mean"),
        (lambda x: x + torch.ones(12, 1), "add"),
        (lambda x: x.sort(1)[0], "sort"),
    ],
)
def test_shown_modules_compute_position_by_position_of_parts(end: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"computes '{name}' of .* ranks have parts, too"):
        parted(end)
