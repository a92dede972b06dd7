"""Search where rows of the batch depend on each other in one call, by running a model on few."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import (
    NOWHERE,
    RowCoupling,
    packed_as,
    with_regions_of,
)
from vescale_parallel._cross_replica.check import CannotRunError
from vescale_parallel._cross_replica.dims.bounds import Bounds, RowsByBounds, leaves_of_bounds
from vescale_parallel._cross_replica.dims.find_packed import rows_of_media, texts_of
from vescale_parallel._cross_replica.dims.listed_rows import unclear_lists
from vescale_parallel._cross_replica.dims.media_tokens import media_tokens
from vescale_parallel._cross_replica.dims.packed_rows import (
    PackedRowsError,
    is_packed,
    num_rows_of_packed,
)
from vescale_parallel._cross_replica.dims.row_counts import (
    OF_ONE_ROW,
    RowDims,
    likely_row_counts,
    row_dim,
    unusual_dims,
    values_of_rows,
)
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.gradients_of_parts import NoNumbersError
from vescale_parallel._cross_replica.parts import NUM_ROWS
from vescale_parallel._cross_replica.runs import NotFewerRowsError, RowCheckError
from vescale_parallel._model.kept_outside import (
    filled_error,
    handed_over_error,
    nothing_kept_outside,
)
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.threads import in_fresh_thread

from .graphs import coupling_of_call
from .more_rows import CallsOfMoreRows
from .num_rows import check_more_rows, chosen_num_rows, is_first_dim, row_counts_to_try
from .one_sequence import depends_on_order, has_one_dim
from .seen import Seen
from .small_batches import holds_rows, some_rows, within
from .trial import Trial

# Of texts with images, which cannot be made shorter: attention of all heads in float64 takes
# half a GB for each layer.
_MOST_TOKENS = 700
NONE = frozenset[str]()


@dataclass(frozen=True)
class RowSearch:
    """Runs a model on small batches made of a call.

    Attributes:
        model: The model.
        given: What it is called with, plain tensors.
        known_rows: How many rows that has, if shapes need not tell.
        subject: Returns what to run, and whether it is scaled down.
        losses_only: Whether, in training, numbers that have no gradient do not matter.
        skips_numbers: Whether they do not in this call.
        filled: Returns what blocks filled in the trial that made the subject.
        listed: Which leaves are of one row each, if lists have something for every row.
        blocks: Blocks of the model, as patterns; None where nothing runs in micro-batches.
        num_ranks: How many ranks share a batch.
    """

    model: nn.Module
    given: Given
    known_rows: int | None
    subject: Callable[[], tuple[nn.Module, bool]]
    losses_only: bool
    skips_numbers: bool
    filled: Callable[[], Collection[str]]
    listed: RowDims = ()
    blocks: frozenset[str] | None = None
    num_ranks: int = 1

    def seen(self, form: str, *, in_groups: bool = False) -> Seen:
        """Return what is seen if rows are where shapes say."""
        found = in_fresh_thread(lambda: self._seen(form, in_groups), of=self.model)
        give_memory_back()
        return found

    def of_dims(self, others: Iterable[RowDims]) -> dict[RowDims, RowCoupling]:
        """Return where rows depend on each other if they are along other dims.

        Those that the model does not run with are left out, and those behind the first ones with
        which rows depend on each other nowhere.
        """
        found = in_fresh_thread(lambda: self._of_dims(others), of=self.model)
        give_memory_back()
        return found

    def _seen(self, form: str, in_groups: bool) -> Seen:
        found, why, is_wrong = NOWHERE, "", False
        packed = rows_of_media(self.model, *self.given)
        try:
            with nothing_kept_outside(self.model) as outside:
                found = self._of_uneven(self._check(in_groups), packed or self.listed)
                handed_over = outside.handed_over() if self.losses_only else []
            for name, _ in handed_over:
                raise ValueError(handed_over_error(name))
            if filled := self.filled():
                raise ValueError(filled_error(min(filled)))
        except RowCheckError as error:
            why, is_wrong = str(error), not isinstance(error, CannotRunError)
            found = replace(found, fails=not is_wrong or isinstance(error, NotFewerRowsError))
        if self.listed:
            return Seen(form, found, why, is_wrong, frozenset(), (), packed, False)
        is_known = self.known_rows is not None
        unusual = unusual_dims(*self.given, is_known=is_known)
        unusual += () if is_known else unclear_lists(*self.given)
        is_sequence = bool(found.regions) and self._is_one_sequence()
        values = values_of_rows(*self.given)
        return Seen(form, found, why, is_wrong, values, unusual, packed, is_sequence)

    def _of_dims(self, others: Iterable[RowDims]) -> dict[RowDims, RowCoupling]:
        found: dict[RowDims, RowCoupling] = {}
        for dims in others:
            # All with bounds are tried: other ranks may not be able to call the same ones so.
            is_of_bounds = bool(leaves_of_bounds(dims))
            if not is_of_bounds and any(not each.regions for each in found.values()):
                break
            with contextlib.suppress(RowCheckError, NoNumbersError, PackedRowsError):
                seen = self._of_uneven(packed_as(self._check_rows(dims), dims), dims)
                seen = with_regions_of(seen, self._of_other_rows(seen, dims))
                found[dims] = seen if self._has_longer(dims) else replace(seen, of_elements=NONE)
        return found

    def _of_other_rows(self, seen: RowCoupling, dims: RowDims) -> RowCoupling:
        """Return what other rows show, where it may be chance that few ones do not meet.

        That integers are no rows, or bounds of them, is found by values that do not tell.
        """
        if seen.regions or not all(dim is None or isinstance(dim, Bounds) for _, dim in dims):
            return NOWHERE
        for by in range(1, NUM_ROWS):
            with contextlib.suppress(RowCheckError, NoNumbersError, PackedRowsError):
                found = replace(self, given=self._turned(by, dims))._check_rows(dims)
                if found.regions:
                    return found
        return NOWHERE

    def _turned(self, by: int, dims: RowDims) -> Given:
        """Return the call with its rows in another order, so that others are looked at."""
        num_rows, told = self.known_rows or likely_row_counts(*self.given)[0], dict(dims)
        leaves, spec = pytree.tree_flatten(self.given)

        def turned(index: int, x: object) -> object:
            dim = told.get(index, row_dim(x, num_rows)) if isinstance(x, Tensor) else None
            if not isinstance(x, Tensor) or not isinstance(dim, int) or dim == OF_ONE_ROW:
                return x
            return x.roll(by, dim)

        return pytree.tree_unflatten([turned(i, x) for i, x in enumerate(leaves)], spec)

    def _has_longer(self, dims: RowDims) -> bool:
        """Whether some row has more than one element, by bounds; else other integers fit, too."""
        leaves = pytree.tree_leaves(self.given)
        bounded = [(index, rows) for index, rows in dims if isinstance(rows, RowsByBounds)]
        return any(len(leaves[index]) != rows.num_rows(leaves) for index, rows in bounded)

    def _of_uneven(self, found: RowCoupling, dims: RowDims) -> RowCoupling:
        """Return what was found with what rows show that have not as many packed as others."""
        if not (is_packed(dims) or found.in_lists):
            return found
        trial = self._trial()
        norms = trial.without_batch_statistics() if found.in_lists else set[str]()
        if not {*found.regions} <= norms:
            return found
        why = trial.why_uneven(self.given, dims)
        if why is None:
            return found
        if found.in_lists:
            return replace(found, regions={**found.regions, "": why})
        of_elements = frozenset({""} if leaves_of_bounds(dims) else ())
        return replace(found, regions={"": why}, of_elements=of_elements)

    def _trial(self) -> Trial:
        return Trial(*self.subject(), self.skips_numbers, bool(self.listed), self.blocks)

    def _is_one_sequence(self) -> bool:
        """Whether rows may be positions of one sequence; see one_sequence.py."""
        if self.known_rows is not None or not has_one_dim(self.given):
            return False
        num_rows = likely_row_counts(*self.given)[0]
        (subject, is_scaled_down) = self.subject()
        whole = some_rows(self.given, num_rows, uneven=False)[0]
        return depends_on_order(subject, within(subject, whole) if is_scaled_down else whole)

    def _check(self, in_groups: bool) -> RowCoupling:
        return coupling_of_call(
            lambda: self.subject()[0],
            self.given,
            lambda: self._check_rows(self.listed, in_groups=in_groups),
            losses_only=self.skips_numbers,
        )

    def _check_rows(self, dims: RowDims = (), *, in_groups: bool = False) -> RowCoupling:
        given, leaves = self.given, pytree.tree_leaves(self.given)
        if any(map(holds_rows, leaves)):
            raise CannotRunError("an object is given that holds tensors, a cache for example")
        trial = self._trial()
        if trial.is_scaled_down:
            _refuse_long(trial.subject, leaves)
        elsewhere = {index for index, dim in dims if dim is None}
        rest = tuple(x for index, x in enumerate(leaves) if index not in elsewhere), {}
        told = rest if elsewhere else given
        found: dict[int, RowCoupling] = {}
        errors: list[CannotRunError] = []
        for num_rows in self._row_counts(dims, leaves, told):
            counts = row_counts_to_try(num_rows, in_groups=in_groups)
            batches = (
                (num_few, some_rows(given, num_rows, uneven=uneven, dims=dims, num_few=num_few))
                for num_few in counts
                for uneven in (True, False)
            )
            try:
                ranks = 1 if dims else self.num_ranks
                more = CallsOfMoreRows(
                    trial.subject, given, num_rows, ranks, is_scaled_down=trial.is_scaled_down
                )
                coupling = trial.coupling(batches, dims, more.callers)
                if coupling.fails and num_rows in counts:
                    is_scaled_down = trial.is_scaled_down
                    check_more_rows(
                        trial.subject, given, num_rows, dims, is_scaled_down=is_scaled_down
                    )
            except CannotRunError as error:
                errors.append(error)
                continue
            found[num_rows] = coupling
            # Steps of time, taken for rows, are coupled; rows mostly are not.
            if not coupling.regions:
                break
        if not errors and not found:
            raise CannotRunError("no tensor is given that has rows")
        if not found:
            raise errors[0]
        chosen = chosen_num_rows(found, told)
        alike = trial.coupling_of_rows_alike(given, chosen, dims)
        both = with_regions_of(found[chosen], alike)
        # Positions of a text may run where rows that are made up do not: they are mostly coupled.
        if errors and both.regions and not is_first_dim(chosen, told):
            raise errors[0]
        return replace(both, fails=True) if errors and both.regions and not dims else both

    def _row_counts(self, dims: RowDims, leaves: Sequence[object], told: Given) -> Sequence[int]:
        of_packed = num_rows_of_packed(leaves, (rows for _, rows in dims))
        known = self.known_rows if of_packed is None else of_packed
        return likely_row_counts(*told) if known is None else [known]


def _refuse_long(model: nn.Module, leaves: Sequence[object]) -> None:
    texts = texts_of(leaves) if media_tokens(model) else None
    shape = () if texts is None else pytree.tree_leaves(leaves[texts])[0].shape
    if len(shape) > 1 and shape[1] > _MOST_TOKENS:
        raise CannotRunError(
            f"texts of {shape[1]} tokens with images are longer than the {_MOST_TOKENS} that are "
            "run to see"
        )
