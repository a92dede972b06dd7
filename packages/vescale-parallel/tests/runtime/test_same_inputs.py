"""Whether ranks were called with what they should: who compares, when, and what they say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._mesh.mesh import build_mesh
from vescale_parallel._runtime.compared.same_inputs import SameInputs

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
SHARED = with_constraints(ParallelPlan(), {"pipeline_parallel.size": 2})
APART = with_constraints(ParallelPlan(), {"data_parallel.size": 2, "data_parallel.zero_stage": 1})


class Model(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids


def rows(first: int) -> Tensor:
    return torch.arange(first, first + 6).view(2, 3)


@pytest.mark.parametrize("call", [0, 1, 3, 64, 128])
def test_other_rows_on_ranks_that_share_them_raise_on_all(
    in_threads: InThreads, call: int
) -> None:
    def calls(rank: int) -> str:
        inputs = SameInputs(Model(), build_mesh(SHARED), is_delayed=False)
        for _ in range(call):
            inputs.check((rows(0),), {})
        with pytest.raises(ValueError, match="the same rows were given different ones") as caught:
            inputs.check((rows(10 * rank),), {})
        return str(caught.value)

    for told in in_threads(2, calls):
        assert "ids" in told
        assert f"in call number {call} of the model" in told


def test_calls_that_are_not_their_turn_are_not_compared(in_threads: InThreads) -> None:
    def calls(rank: int) -> None:
        inputs = SameInputs(Model(), build_mesh(SHARED), is_delayed=False)
        for call in range(10):
            inputs.check((rows(10 * rank if call >= 4 else 0),), {})

    in_threads(2, calls)


def test_a_keyword_is_the_argument_of_that_name(in_threads: InThreads) -> None:
    def calls(rank: int) -> None:
        inputs = SameInputs(Model(), build_mesh(SHARED), is_delayed=False)
        # One rank passes by position what the other passes by name.
        args, kwargs = (
            ((rows(0), rows(1)), {}) if rank else ((), {"mask": rows(1), "ids": rows(0)})
        )
        inputs.check(args, kwargs)
        with pytest.raises(ValueError, match="mask"):
            inputs.check((rows(0),), {"mask": rows(rank)})

    in_threads(2, calls)


def test_where_numbers_take_time_the_next_call_looks_at_them(in_threads: InThreads) -> None:
    def calls(rank: int) -> None:
        inputs = SameInputs(Model(), build_mesh(SHARED), is_delayed=True)
        inputs.check((rows(0),), {})
        inputs.check((rows(10 * rank),), {})
        with pytest.raises(ValueError, match="in call number 1 of the model"):
            inputs.check((rows(0),), {})

    in_threads(2, calls)


@pytest.mark.parametrize("is_same", [True, False])
def test_the_same_batch_on_data_parallel_ranks_warns_once(
    in_threads: InThreads, is_same: bool
) -> None:
    def calls(rank: int) -> None:
        inputs = SameInputs(Model(), build_mesh(APART), is_delayed=False)
        for _ in range(3):
            inputs.check((rows(0 if is_same else 10 * rank),), {})
            inputs.after_backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_threads(2, calls)
    messages = [str(each.message) for each in caught]
    assert len(messages) == (2 if is_same else 0)
    for message in messages:
        assert message.startswith("2 data-parallel ranks were called with 1 different batches")


def test_evaluation_of_one_rank_alone_waits_for_nobody(in_threads: InThreads) -> None:
    def calls(rank: int) -> None:
        inputs = SameInputs(Model(), build_mesh(APART), is_delayed=False)
        if rank == 0:
            with torch.no_grad():
                inputs.check((rows(0),), {})
            inputs.after_backward()

    in_threads(2, calls)
