"""Runs of a model on small batches, of which the first one that it takes tells about its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from vescale_parallel._cross_replica.borders import NOWHERE, RowCoupling
from vescale_parallel._cross_replica.check import Callers, CannotRunError, row_coupling
from vescale_parallel._cross_replica.dims.bounds import GivenBounds, leaves_of_bounds
from vescale_parallel._cross_replica.dims.listed_rows import rows_in_lists, uneven_lists
from vescale_parallel._cross_replica.dims.packed_rows import num_rows_of_packed
from vescale_parallel._cross_replica.dims.row_counts import RowDims
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.gradients_of_parts import NoNumbersError
from vescale_parallel._cross_replica.parts import NUM_ROWS
from vescale_parallel._model.fqns import generalize
from vescale_parallel._torch_private import pytree

from .over_lists import BATCH_NORMS
from .small_batches import extremes_of, some_rows, within
from .uneven_rows import uneven_batches, why_uneven


@dataclass(frozen=True)
class Trial:
    """A model to run, with random values.

    Attributes:
        subject: The model.
        is_scaled_down: Whether it has fewer layers than the real one, and a smaller vocabulary.
        skips_numbers: Whether numbers that it returns without a gradient do not matter.
        in_lists: Whether lists have something for every row; see [Note: rows in lists].
        blocks: Blocks of the model, as patterns; None where nothing runs in micro-batches.
    """

    subject: nn.Module
    is_scaled_down: bool
    skips_numbers: bool
    in_lists: bool = False
    blocks: frozenset[str] | None = None

    def coupling(
        self,
        batches: Iterable[tuple[int, list[Given]]],
        dims: RowDims,
        callers: Callers = lambda regions: {},
    ) -> RowCoupling:
        """Return what the first batch shows that the model runs on, each with both halves.

        ``dims`` says where the rows are; ``callers`` are as for :func:`row_coupling`.

        Raises:
            CannotRunError: If it runs on none.
        """
        errors: list[CannotRunError] = []
        for num_rows, batch in batches:
            bounds = GivenBounds.of(dims, batch[0], batch[1:])
            whole, *halves = self._fitting(batch, dims)
            try:
                found = row_coupling(
                    self.subject,
                    whole,
                    halves,
                    num_rows=num_rows,
                    losses_only=self.skips_numbers,
                    bounds=bounds,
                    in_lists=self.in_lists,
                    blocks=self.blocks,
                    callers=callers,
                )
            except CannotRunError as error:
                errors.append(error)
                continue
            return found.as_patterns() if self.is_scaled_down else found
        raise errors[-1] if errors else CannotRunError("no other number of rows is likely")

    def coupling_of_rows_alike(self, given: Given, num_rows: int, dims: RowDims) -> RowCoupling:
        """Return where rows depend on each other if no two halves share a value.

        A loss without a single target that counts, for example, may be computed otherwise.
        """
        for kind in extremes_of(self.subject):
            rows = some_rows(given, num_rows, uneven=False, alike=kind, dims=dims)
            # Such rows need not fit the model.
            with contextlib.suppress(CannotRunError, NoNumbersError):
                return self.coupling([(NUM_ROWS, rows)], dims)
        return NOWHERE

    def without_batch_statistics(self) -> set[str]:
        """Have batch norms normalize each row by itself, by running statistics; name them."""
        modules = self.subject.named_modules()
        norms = {fqn: each for fqn, each in modules if isinstance(each, BATCH_NORMS)}
        for each in norms.values():
            each.eval()
        return {*norms} | ({*map(generalize, norms)} if self.is_scaled_down else set())

    def why_uneven(self, given: Given, dims: RowDims) -> str | None:
        """Return how losses are no means over rows of which some have more packed than others."""
        are_bounded = bool(leaves_of_bounds(dims))
        listed = rows_in_lists(*given) if self.in_lists else None
        if listed is not None:
            batches = uneven_lists(given, listed)
        else:
            batches = _of_short_rows(given, dims) if are_bounded else uneven_batches(given, dims)
        more = "elements" if are_bounded or self.in_lists else "images"
        for batch in batches:
            whole, *halves = self._fitting(batch, dims)
            if (
                why := why_uneven(self.subject, whole, halves, rows=are_bounded, more=more)
            ) is not None:
                return why
        return None

    def _fitting(self, batch: list[Given], dims: RowDims) -> list[Given]:
        return [within(self.subject, x, dims) for x in batch] if self.is_scaled_down else batch


def _of_short_rows(given: Given, dims: RowDims) -> Iterator[list[Given]]:
    """Yield a batch of which rows of the second half are shorter."""
    num_rows = num_rows_of_packed(pytree.tree_leaves(given), (rows for _, rows in dims))
    assert num_rows is not None
    yield some_rows(given, num_rows, uneven=False, dims=dims, has_short=True)
