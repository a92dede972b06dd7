"""Calls whose packed tensors show only after the first one of their form; see rows_by_tokens.py.

Calls of one form may have one image for every row, and then none for some and two for others:
the shapes of the first one, where nothing is as long as in the others, say something else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from torch import nn

from vescale_parallel._cross_replica.borders import RowCoupling, Rows, packed_as
from vescale_parallel._cross_replica.dims.find_packed import (
    newly_packed,
    packed_rows,
    unknown_rows,
)
from vescale_parallel._cross_replica.dims.media_tokens import media_tokens
from vescale_parallel._cross_replica.dims.packed_rows import PackedRows, num_rows_of_packed
from vescale_parallel._cross_replica.dims.row_counts import RowDims
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._model.inputs import has_dims, usual_rows_dim
from vescale_parallel._model.leaf_names import names_of_call
from vescale_parallel._torch_private import pytree

from .search import RowSearch


class PackedCalls:
    """Knows what calls of a form pack, where that is not known since the first one.

    Attributes:
        dims: By form, where the rows of its latest calls are.
    """

    def __init__(self) -> None:
        self.dims: dict[Hashable, RowDims] = {}
        self._as_before = set[tuple[Hashable, frozenset[int]]]()

    def told(
        self,
        form: Hashable,
        coupling: RowCoupling,
        before: RowDims,
        model: nn.Module,
        given: Given,
        search: Callable[[], RowSearch],
    ) -> RowCoupling:
        """Return what is known of a call with the tensors told that it packs.

        Args:
            form: Of the call.
            coupling: What is known of calls of the form.
            before: Where rows were in calls before, if not where shapes say.
            model: Whose configuration may name tokens.
            given: What it is called with.
            search: Returns what runs it on few rows of the call.

        Raises:
            PackedRowsError: If the model runs on fewer rows of the call neither way.
        """
        if coupling.given is None:
            return self._unchecked(form, coupling, model, given)
        coupling = packed_as(coupling, self.dims.get(form, ()))
        new = newly_packed(model, *given, coupling.given or ())
        leaves = frozenset(index for index, _ in new)
        if not new or (form, leaves) in self._as_before:
            return coupling
        dims = (*(dict(before) | dict(new)).items(),)
        # Tokens count for more than shapes: two rows of which one has two images and one none
        # run with the first two images, too.
        found = search()
        if _runs(found, dims, coupling):
            self.dims[form] = dims
            return packed_as(coupling, dims)
        if not _runs(found, before, coupling):
            names = names_of_call(*given)
            raise unknown_rows([names[index] for index in sorted(leaves)])
        self._as_before.add((form, leaves))
        return coupling

    def _unchecked(
        self, form: Hashable, coupling: RowCoupling, model: nn.Module, given: Given
    ) -> RowCoupling:
        """Return what tokens say of a call of a model that could not be run on fewer rows."""
        if not media_tokens(model):
            return coupling
        packed = packed_rows(model, *given)
        told = self.dims.setdefault(form, packed) if packed else self.dims.get(form, ())
        leaves = pytree.tree_leaves(given)
        num_rows = num_rows_of_packed(leaves, (rows for _, rows in told))
        evens = (rows.is_even for _, rows in told if isinstance(rows, PackedRows))
        if num_rows is None or all(evens):
            return coupling  # shapes say as much
        dims = (usual_rows_dim(x.shape, num_rows) if has_dims(x) else None for x in leaves)
        rows = tuple(None if dim is None else Rows(dim) for dim in dims)
        return packed_as(replace(coupling, given=rows), told)


def _runs(search: RowSearch, dims: RowDims, coupling: RowCoupling) -> bool:
    """Whether a call runs on fewer rows along some dims, which depend on each other as known."""
    found = search.of_dims([dims]).get(dims)
    return found is not None and not found.fails and {*found.regions} <= {*coupling.regions}
