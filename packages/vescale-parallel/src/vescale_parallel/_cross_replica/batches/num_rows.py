"""How many rows a call has, of the numbers that fit its shapes, and how many a check takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from vescale_parallel._cross_replica.batches.small_batches import some_rows, within
from vescale_parallel._cross_replica.borders import RowCoupling, unclear_rows
from vescale_parallel._cross_replica.check import CannotRunError, UnclearRowsError
from vescale_parallel._cross_replica.dims.row_counts import RowDims, shapes_with_rows
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.parts import NUM_PARTS, NUM_ROWS
from vescale_parallel._cross_replica.runs import Call, NotFewerRowsError, run_module, seeded
from vescale_parallel._model.inputs import usual_num_rows

_MOST_IN_GROUPS = 64


def is_first_dim(num_rows: int, given: Given) -> bool:
    """Whether a tensor of a call has as many rows as its first dim, as most have."""
    return any(shape[0] == num_rows for shape in shapes_with_rows(*given))


def row_counts_to_try(num_rows: int, *, in_groups: bool) -> list[int]:
    """Return how many rows to run a model on, few or, ``in_groups``, as many as its code takes.

    See [Note: groups of rows]. A rank has some of them, or half of one, if two ranks share it.
    The least number that code runs on is mostly one group, of which halves do not run: rows
    depend on each other, then.
    """
    if not in_groups:
        return [NUM_ROWS]
    even = range(NUM_ROWS + 2, _MOST_IN_GROUPS + 1, 2)
    return [count for count in even if 2 * num_rows % count == 0]


def chosen_num_rows(found: Mapping[int, RowCoupling], given: Given) -> int:
    """Return how many rows there are, of the numbers that were tried in this order.

    Raises:
        UnclearRowsError: If shapes and runs fit more than one.
    """
    first, *_, last = [*found, *found]
    usual, firsts = usual_num_rows(given), {shape[0] for shape in shapes_with_rows(*given)}
    if last == first or (found[last].regions and (first == usual or usual not in found)):
        return first
    # Of numbers of which each is the first dim of a tensor, targets (B) beside (T, B) or positions
    # (S) beside (B, S), only the run can tell.
    is_told = first not in firsts or (last in firsts and last != usual)
    if found[last].regions or not is_told:
        error = NotFewerRowsError if found[first].fails else UnclearRowsError
        raise error(unclear_rows(found[first], first, found[last], last))
    return last


def check_more_rows(
    subject: nn.Module, given: Given, num_rows: int, dims: RowDims, *, is_scaled_down: bool
) -> None:
    """Raise if a model that does not run on half of a call's rows does not on twice as many.

    Where a tensor has several images for each row, or all edges of all rows, neither does run,
    which tells nothing of rows: whoever calls the model has as many of both. And nobody could
    compute over the rows of all ranks.

    Raises:
        CannotRunError: If it does not.
    """
    count = 2 * num_rows
    some = some_rows(given, num_rows, uneven=False, dims=dims, num_few=count, repeats=True)
    twice: Any = some[0]
    if is_scaled_down:
        twice = within(subject, twice, dims)
    with warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        error = run_module(subject, "", Call(*twice), [], NUM_PARTS).error
    if error is not None:
        raise CannotRunError(f"the model: {error}")
