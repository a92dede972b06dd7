"""What ranks see of a form of call, and where else rows may be than where shapes say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vescale_parallel._cross_replica.borders import RowCoupling, joined, named
from vescale_parallel._cross_replica.dims.bounds import RowsByBounds, leaves_of_bounds
from vescale_parallel._cross_replica.dims.row_counts import RowDims, ValuesOfRows, is_of_list
from vescale_parallel._cross_replica.dims.rows_by_tokens import RowsByTokens, common_rows

from .one_sequence import ONE_SEQUENCE


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a form of call.

    Attributes:
        form: The form.
        found: Where rows depend on each other.
        why: Why that is not known, if it is not.
        is_wrong: Whether the call is refused for it.
        values: Of tensors taken for rows, see :func:`.row_counts.values_of_rows`.
        unusual: Where rows may be, too, by shapes.
        packed: How many elements they have of packed tensors, by tokens.
        is_sequence: Whether rows may be the positions of one sequence; see one_sequence.py.
    """

    form: str
    found: RowCoupling
    why: str
    is_wrong: bool
    values: frozenset[ValuesOfRows]
    unusual: tuple[RowDims, ...]
    packed: tuple[tuple[int, RowsByTokens], ...] = ()
    is_sequence: bool = False


def unusual_dims_of(ranks: Sequence[Seen], known: RowCoupling | None) -> tuple[RowDims, ...]:
    """Return where else to look for rows than where shapes say, if that may be needed at all.

    ``known`` is what is known of where they depend on each other by shapes, None if nothing is.
    """
    if known is not None and not known.regions:
        return ()
    # Values decide what may have bounds, and ranks have others.
    unusual = tuple(dict.fromkeys(itertools.chain.from_iterable(each.unusual for each in ranks)))
    packed = common_rows([each.packed for each in ranks])
    return (packed, *unusual) if packed else unusual


def doubtful_leaves(ranks: Sequence[Seen]) -> list[int]:
    """Return which leaves may have no rows; see [Note: tensors as long as the batch].

    All ranks have the same there, and either some code does not run on fewer rows, or it is not by
    chance that ranks have the same, and rows depend on each other.
    """
    same = frozenset.intersection(*(each.values for each in ranks))
    if any(each.found.fails for each in ranks):
        return sorted(each.index for each in same)
    if len(ranks) == 1 or not any(each.found.regions for each in ranks):
        return []
    return sorted(each.index for each in same if each.is_telling)


def less_dependent(
    ranks: Sequence[Mapping[RowDims, RowCoupling]], known: RowCoupling | None
) -> tuple[RowDims, RowCoupling] | None:
    """Return the dims for which rows depend on each other least, on all ranks, and where.

    None if that is nowhere less than is ``known``, where anything is.
    """
    best: tuple[RowDims, RowCoupling] | None = None
    for dims in ranks[0]:
        if not all(dims in each for each in ranks):
            continue
        found = joined([each[dims] for each in ranks])
        limit = (None if _is_told(dims, known, found) else known) if best is None else best[1]
        if not found.fails and (limit is None or {*found.regions} < {*limit.regions}):
            best = dims, found
    return best


def _is_told(dims: RowDims, known: RowCoupling | None, found: RowCoupling) -> bool:
    """Whether a run with bounds of rows tells more than one without, whatever is coupled then.

    Bounds that do not begin with 0 make code fail, or rows that belong to nobody seem coupled.
    """
    if known is None or not leaves_of_bounds(dims):
        return False
    # Labels in order may be taken for owners, or for where rows of anything longer begin.
    kinds = {rows.kind for _, rows in dims if isinstance(rows, RowsByBounds)}
    return known.fails or bool(kinds - {"owners", "starts"} and found.of_elements)


def refusal(ranks: Sequence[Seen]) -> str | None:
    """Return why a call is refused, if it is."""
    wrong = [each.why for each in ranks if each.is_wrong]
    wrong += [ONE_SEQUENCE for each in ranks if each.is_sequence]
    return next(iter(wrong), None)


def two_batches(found: RowCoupling, other: RowCoupling, dims: RowDims) -> str:
    """Return that a call fits two batches, in the first of which rows depend on each other."""
    elsewhere = named(other) or "nowhere"
    if is_of_list(dims):
        return (
            "it cannot be told what a list of dicts or tuples holds that has as many as the batch "
            f"has rows: if each is a column of all rows, they depend on each other in "
            f"{named(found)}; if each is of one row, {elsewhere}. Give columns as arguments of "
            "their own or in a dict, what rows have of their own in padded tensors, or another "
            "number of rows a rank"
        )
    return (
        "it cannot be told which dim of a call's tensors the rows of the batch are, since the "
        f"first two are as long: if the first one, they depend on each other in {named(found)}; "
        f"if the second one, {elsewhere}. Give parallelize the data set, whose "
        "batches have rows first, or use data_parallel.size 1"
    )
