"""Ranks that exchange parameters agree on the order, or say that they do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import all_gather
from vescale_parallel._data_parallel import mix_up
from vescale_parallel._data_parallel.mix_up import END_OF_BACKWARD, Exchanges
from vescale_parallel._torch_private import default_store

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


def step(exchanges: Exchanges, numbers: list[int]) -> None:
    """Exchange groups of parameters, and compare the order."""
    group = dist.group.WORLD
    assert group is not None
    exchanges.begin_forward()
    for number in numbers:
        exchanges.begin(number, group)
        all_gather(torch.tensor(number), group)
    exchanges.begin(END_OF_BACKWARD, group)
    exchanges.compare(group, all_gather(exchanges.bytes_to_compare(), group))
    exchanges.end(of_step=True)


def asked(exchanges: Exchanges) -> int:
    return sum(each.num_asked for each in exchanges._questions.values())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_order_that_is_the_same_on_all_ranks_goes_through(
    in_threads: InThreads, size: int
) -> None:
    def on_rank(rank: int) -> int:
        drawn, exchanges = random.Random(0), Exchanges()
        for _ in range(12):
            step(exchanges, [drawn.randrange(2, 5) for _ in range(drawn.randrange(1, 5))])
        return asked(exchanges)

    counts = in_threads(size, on_rank)
    assert counts[0] > 0
    assert len({*counts}) == 1


def test_an_order_that_is_known_costs_nothing(in_threads: InThreads) -> None:
    def on_rank(rank: int) -> int:
        exchanges = Exchanges()
        for _ in range(3):
            step(exchanges, [2, 3, 3, 2])
        return asked(exchanges)

    assert in_threads(2, on_rank) == [0, 0]


def test_ranks_that_leave_the_order_for_different_exchanges_raise(in_threads: InThreads) -> None:
    def on_rank(rank: int) -> str:
        exchanges = Exchanges()
        step(exchanges, [2, 3])
        with pytest.raises(ValueError, match="ran different blocks") as caught:
            step(exchanges, [2, 4 + rank])
        return str(caught.value)

    for rank, message in enumerate(in_threads(2, on_rank)):
        assert f"(rank {rank} another one than rank {1 - rank})" in message


def test_orders_that_differ_from_the_start_are_found_at_the_end(in_threads: InThreads) -> None:
    def on_rank(rank: int) -> None:
        exchanges = Exchanges()
        with pytest.raises(ValueError, match="ran different blocks"):
            step(exchanges, [2, 3 + rank, 7])
        step(exchanges, [2, 3])  # collectives were in step all the time
        step(exchanges, [3, 2])

    in_threads(2, on_rank)


def test_several_models_have_orders_of_their_own(in_threads: InThreads) -> None:
    def on_rank(rank: int) -> None:
        one, other = Exchanges(), Exchanges()
        for index in range(4):
            step(one, [2, 3 + index])
            step(other, [5 - index, 2])

    in_threads(3, on_rank)


def test_what_a_program_that_draws_its_order_leaves_is_bounded(
    in_threads: InThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix_up, "MAX_ORDERS", 3)

    def on_rank(rank: int) -> tuple[int, int]:
        exchanges, store = Exchanges(), default_store()
        before = store.num_keys()
        for index in range(12):
            step(exchanges, [2, 10 + index, 3])
        return len(exchanges._orders), store.num_keys() - before

    for num_orders, num_keys in in_threads(2, on_rank):
        assert num_orders <= 3
        assert num_keys <= 8  # those of the last question, and of one that is asked by others
