"""Calls with one dim, of which nobody can say whether it is rows of a batch or one sequence.

A tagger that is given the words of a sentence, (words), and a table of users that is given a user
for each row, (rows), are called alike. Where rows depend on each other code runs over those of all
ranks, one rank's behind the other's: of two sentences that would make one. Statistics of a batch
do not depend on the order of its rows; a sequence does.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.parts import NUM_PARTS, equal
from vescale_parallel._cross_replica.runs import Call, run_module, seeded
from vescale_parallel._model.inputs import has_dims
from vescale_parallel._torch_private import pytree

ONE_SEQUENCE = (
    "it cannot be told whether the only dim of what the model is called with is the rows of a "
    "batch or the positions of one sequence: what it returns depends on their order, and "
    "data-parallel ranks would run those of all of them as one. Give one sequence a dim of rows, "
    "(1, positions); for rows give parallelize the data set, whose batches have rows first; or "
    "use data_parallel.size 1"
)


def has_one_dim(given: Given) -> bool:
    """Whether no tensor of a call has more than one dim, and some has one."""
    dims = {x.dim() for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
    return bool(dims) and max(dims) == 1


def depends_on_order(subject: nn.Module, batch: Given) -> bool:
    """Whether a model returns other things for the rows of a small batch in reverse."""
    (num_rows, *_) = [len(x) for x in pytree.tree_leaves(batch) if has_dims(x)]

    def reversed_rows(x: Any) -> Any:
        return x.flip(0) if has_dims(x) and len(x) == num_rows else x

    turned: Any = pytree.tree_map(reversed_rows, batch)
    with warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        run = run_module(subject, "", Call(*batch), [], NUM_PARTS)
        other = run_module(subject, "", Call(*turned), [], NUM_PARTS)
    if run.error is not None or other.error is not None:
        return False
    pairs = zip(run.call.outputs, other.call.outputs, strict=False)
    return any(
        isinstance(x, Tensor) and isinstance(y, Tensor) and not equal(reversed_rows(y), x)
        for x, y in pairs
    )
