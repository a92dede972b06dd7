"""What a check of rows has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from vescale_parallel._loss.sum_ratios import SumRatios
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.leaf_names import leaf_names

from .borders import ModuleRows, Output, RowCoupling, Rows, structure
from .dims.bounds import GivenBounds
from .hooks.hooked import Hooked
from .kept import Place, absolute, names_of
from .parts import where_rows
from .results.means import with_means
from .results.row_lists import with_lists
from .runs import Call, tells_num_rows

Given = tuple[tuple[Any, ...], dict[str, Any]]

NO_BOUNDS = GivenBounds()


@dataclass
class Found:
    """What was found so far.

    Attributes:
        losses_only: Whether numbers that have no gradient do not matter.
        num_rows: How many all rows are.
        bounds: Of rows, which the model is given.
        regions: Modules in whose own code rows depend on each other, and why.
        module_rows: By module and form of call.
        unclear: Calls of which it cannot be told where the rows are in what they are given.
        mixed: Likewise in what they return: both dims of (batch x batch), for example.
        callers: Modules whose own code calls a module.
        names: Of what the model returns.
        is_flat: Whether a loss was one number for all rows and for parts of them, beyond a margin.
        written: Parameters that forward writes to, with values that every run begins with.
        read: Attributes that depend on the rows, and that the next call computes with.
        rows_read: Attributes that have something for every row, and that the next call reads.
        kept: Others that depend on the rows.
        added: Buffers that rows add to, which do not count as depending on rows.
        may_add: Buffers that were found to be such.
        fails: Whether some code does not run on fewer rows.
        of_elements: Modules that are given several elements of each row, or bounds of rows.
        in_lists: Whether lists have something for every row; see [Note: rows in lists].
        blocks: Blocks of the model, as patterns.
        divides: Whether the model's code may divide by sums.
        counts_ratios: Whether sums of all parts divide outside of blocks.
        ratios: Of what the model divides by sums then, in order, in which they do.
        hooked: Layers on which other modules have put hooks.
    """

    losses_only: bool
    num_rows: int
    bounds: GivenBounds = NO_BOUNDS
    regions: dict[str, str] = field(default_factory=dict[str, str])
    module_rows: dict[tuple[str, str], ModuleRows] = field(
        default_factory=dict[tuple[str, str], ModuleRows]
    )
    unclear: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    mixed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    callers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    names: list[str] = field(default_factory=list[str])
    is_flat: bool = False
    written: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    read: set[Place] = field(default_factory=set[Place])
    rows_read: set[Place] = field(default_factory=set[Place])
    kept: set[Place] = field(default_factory=set[Place])
    added: frozenset[str] = frozenset()
    may_add: frozenset[str] = frozenset()
    fails: bool = False
    of_elements: set[str] = field(default_factory=set[str])
    in_lists: bool = False
    blocks: frozenset[str] = frozenset()
    divides: bool = False
    counts_ratios: bool = False
    ratios: tuple[bool, ...] = ()
    hooked: list[Hooked] = field(default_factory=list[Hooked])

    def absorb_hooked(self) -> None:
        """Make regions of what runs between regions and layers whose rows hooks keep for them."""
        for each in self.hooked:
            if any(map(each.is_read_by, [*self.regions])):
                why = f"a hook on {each.layer!r} keeps rows for code in which they meet"
                self.regions.update((fqn, self.regions.get(fqn, why)) for fqn in each.between())

    def ratios_in(self, fqn: str, are_counted: Sequence[bool] | None = None) -> SumRatios | None:
        """Return what sees ratios of sums in a module's run, None where they are not counted."""
        is_in_block = any(
            generalize(fqn[:end]) in self.blocks
            for end in range(len(fqn) + 1)
            if fqn[end : end + 1] in ("", ".")
        )
        return SumRatios(are_counted) if self.counts_ratios and not is_in_block else None

    def coupling(self, whole: Given, halves: Sequence[Given]) -> RowCoupling:
        """Return what was found, of a call with these rows and parts."""
        given, _ = where_rows(Call(*whole).inputs, Call(*halves[0]).inputs, self.num_rows)
        return RowCoupling(
            regions=self.regions,
            module_rows=self.useful_rows(),
            given=given,
            returned=self.returned(whole),
            written=frozenset(self.written),
            added=self.added,
            kept=names_of(at for at in self.kept if at[0] not in self.regions),
            rows_read=names_of(self.rows_read),
            fails=self.fails,
            of_elements=frozenset(self.of_elements & {*self.regions}),
            in_lists=self.in_lists,
            ratios=self.ratios if any(self.ratios) else (),
        )

    def useful_rows(self) -> dict[tuple[str, str], ModuleRows]:
        """Return those of regions, and of what can be left to run on a part of the rows."""
        regions = {*self.regions}
        mixed = self.mixed | {at for at, rows in self.module_rows.items() if rows.has_lists}
        return {
            at: replace(rows, outputs=()) if rows.has_lists else rows
            for at, rows in self.module_rows.items()
            if at not in self.unclear
            and (
                at[0] in regions or (self.callers.get(at[0], set()) & regions and at not in mixed)
            )
        }

    def returned(self, whole: Given) -> tuple[tuple[str, Output], ...] | None:
        """Return where the rows are in what the model returns, if that can be told."""
        at = "", structure(whole)
        rows = self.module_rows.get(at)
        if rows is None or at in self.mixed or len(rows.outputs) != len(self.names):
            return None
        if rows.has_lists and "" in self.regions:
            return None
        return tuple(zip(self.names, rows.outputs, strict=True))

    def needs_caller(self, fqn: str, call: Call) -> str | None:
        """Return what a module's caller has set in it that needs all rows, as the caller then.

        What is set is of all rows where the caller's code is, so the module runs on these, too.
        """
        if any(isinstance(value, Tensor) for value in call.held.values()):
            self.unclear.add((fqn, structure((call.args, call.kwargs))))
        for place in call.held:
            holder, name = absolute(fqn, place)
            if holder in self.regions:
                return name
        return None

    def add(self, fqn: str, whole: Call, parts: Sequence[Call]) -> None:
        at = fqn, structure((whole.args, whole.kwargs))
        if not fqn:
            self.names = leaf_names(whole.output if whole.folded is None else whole.folded)
        inputs, is_clear = where_rows(whole.inputs, parts[0].inputs, self.num_rows, self.bounds)
        outputs, is_row_wise = where_rows(whole.outputs, parts[0].outputs, self.num_rows)
        if fqn and not any(inputs) and tells_num_rows(whole, parts[0]):
            # A region's code tells the number of all rows, so it is made for all of them.
            outputs = (None,) * len(outputs)
        compared = [] if fqn or not self.losses_only else [part.outputs for part in parts]
        means = with_means(outputs, parts[0].are_means, whole.outputs, compared)
        rows = ModuleRows(inputs, with_lists(means, whole.outputs))
        if self.bounds.each and self._are_elements(whole.inputs, inputs):
            self.of_elements.add(fqn)
        if not is_clear or self.module_rows.setdefault(at, rows) != rows:
            self.unclear.add(at)
        if not is_row_wise:
            self.mixed.add(at)

    def _are_elements(self, given: Sequence[Any], inputs: Sequence[Rows | None]) -> bool:
        """Whether a module is given several elements of each row, or bounds."""
        return any(
            where is not None and (where.bounds or x.shape[where.dim] != self.num_rows)
            for x, where in zip(given, inputs, strict=True)
        )
