"""Where the rows of a batch are in tensors, and where they depend on each other; pure data.

Kept apart from what finds it (:mod:`.check`) and from what carries it out
(:mod:`.regions.row_regions`): plain data, and what is read off shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize
from vescale_parallel._torch_private import pytree

from .dims.bounds import Bounds, Kind, num_rows_of_bounds
from .dims.listed_rows import rows_in_lists
from .dims.packed_rows import PackedRows, PackedRowsError, num_rows_of_packed
from .dims.row_counts import RowDims, num_nodes_of, num_rows_of


@dataclass(frozen=True)
class Rows:
    """The dim of one tensor that the rows of the batch are along.

    Attributes:
        dim: The dim.
        outermost: Whether a row's elements follow each other, as in (batch x time); if not,
            the dim is (time x batch).
        lengths: How many elements every row has, of a packed tensor of a call; see
            [Note: packed rows]. Empty if all have as many, None if the call does not tell.
        is_optional: Whether the model takes None in place of a packed tensor without elements.
        bounds: What bounds of rows there are along the dim, if any; see [Note: bounds of rows].
    """

    dim: int
    outermost: bool = True
    lengths: tuple[int, ...] | None = ()
    is_optional: bool = False
    bounds: Kind | None = None

    @property
    def is_packed(self) -> bool:
        """Whether rows may have other numbers of elements along the dim."""
        return self.lengths != () or self.bounds == "owners"

    def num_rows(self, tensor: Tensor) -> int:
        """Return how many rows a tensor has that is not packed."""
        return num_rows_of_bounds(tensor, self.bounds) if self.bounds else tensor.shape[self.dim]

    def placement(self, length: int, num_rows: int) -> Placement:
        """Return how ranks hold a tensor, given what this one has of the dim and of the batch."""
        if self.outermost or length == num_rows:
            return Shard(self.dim)
        return InterleavedShard(self.dim, length // num_rows)


@dataclass(frozen=True)
class MeanOfParts:
    """Of a number: the batch's is the mean over what ranks have; see :mod:`.results.means`."""


@dataclass(frozen=True)
class NotOfParts:
    """Of a number: the batch's is neither the mean over what ranks have nor what each has."""


@dataclass(frozen=True)
class ListOfRows:
    """Of a list: it has as many elements of each row, one row after the other."""


# Where the rows are in what is returned, or what a number is; None for what has no rows.
Output = Rows | MeanOfParts | NotOfParts | ListOfRows | None


@dataclass(frozen=True)
class ModuleRows:
    """Where the rows are in what a module takes and returns; None for tensors without rows."""

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Output, ...]

    @property
    def has_lists(self) -> bool:
        """Whether rows are in lists of what is returned: a region returns those of all rows."""
        return any(isinstance(each, ListOfRows) for each in self.outputs)


@dataclass(frozen=True)
class RowCoupling:
    """Where rows of a batch depend on each other in one form of call of a model.

    Attributes:
        regions: Modules whose own code lets rows depend on each other, with how that was seen.
        module_rows: Of regions, and of modules that a region's code calls and in whose own code
            rows do not depend on each other: by name and by what they are called with.
        of_patterns: Whether names are patterns, ``layers.*.norm``, since a scaled-down model
            with fewer layers was looked at.
        given: Where the rows are in what the model is given, by what is known before a call;
            None if it was not looked at. See :meth:`rows_of`.
        returned: Likewise in what it returns, by ``leaf_names``; None also if that cannot be
            told.
        written: Parameters that forward writes to.
        kept: Attributes that depend on the rows, and that no call computes with.
        rows_read: Attributes with something for every row, which the next call computes with.
        added: Buffers that rows add to, which are summed over ranks and micro-batches and are no
            reason for a region; see [Note: buffers that rows add to].
        apart: The same with such buffers, and where ratios of sums are over all parts; None if
            there are none.
        ratios: Of what forward divides by sums, in order, in which those of all parts divide; they
            are no reason for a region then, see [Note: ratios of sums]. Empty if in none.
        fails: Whether some code does not run on fewer rows.
        of_graphs: Whether every rank has graphs of its own; see [Note: graphs of ranks].
        of_elements: Regions that are given elements of packed tensors whose rows have bounds, or
            these bounds: ranks would need as many.
        in_lists: Whether lists have something for every row; see [Note: rows in lists].
    """

    regions: Mapping[str, str] = field(default_factory=dict[str, str])
    module_rows: Mapping[tuple[str, str], ModuleRows] = field(
        default_factory=dict[tuple[str, str], ModuleRows]
    )
    of_patterns: bool = False
    given: tuple[Rows | PackedRows | None, ...] | None = None
    returned: tuple[tuple[str, Output], ...] | None = None
    written: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    rows_read: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    apart: RowCoupling | None = None
    fails: bool = False
    of_graphs: bool = False
    of_elements: frozenset[str] = frozenset()
    in_lists: bool = False
    ratios: tuple[bool, ...] = ()

    def num_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return how many rows of the batch a call of the model has on this rank."""
        if self.of_graphs:
            return num_nodes_of((args, kwargs)) or 0
        if self.in_lists:
            return rows_in_lists(args, kwargs) or num_rows_of(args, kwargs)
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        given = self.given if self.given is not None and len(self.given) == len(leaves) else ()
        if (of_packed := num_rows_of_packed(leaves, given)) is not None:
            return of_packed
        for leaf, rows in zip(leaves, given, strict=False):
            if isinstance(rows, Rows) and isinstance(leaf, Tensor) and rows.lengths == ():
                return rows.num_rows(leaf)
        return num_rows_of(args, kwargs)

    def rows_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, to_cut: bool = False
    ) -> tuple[Rows | None, ...] | None:
        """Return where the rows are in every leaf of a call's arguments, None if not looked at.

        Raises:
            PackedRowsError: If the call does not tell how many elements of a packed tensor they
                have, and that matters ``to_cut`` it.
        """
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        if self.given is None or len(self.given) != len(leaves):
            return None
        return tuple(
            _of_packed(rows, leaves, index, to_cut) if isinstance(rows, PackedRows) else rows
            for index, rows in enumerate(self.given)
        )

    def shapes_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Return what ranks have alike of a call's tensors: shapes, without what is packed."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        given = [None] * len(leaves) if self.of_elements else self.rows_of(args, kwargs)
        return [
            tuple(x.shape[1:] if where is not None and where.is_packed else x.shape)
            for x, where in zip(leaves, given or [None] * len(leaves), strict=True)
            if isinstance(x, Tensor)
        ]

    def is_region(self, fqn: str) -> bool:
        """Whether rows depend on each other in a module's own code."""
        return self._named(fqn) in self.regions

    def is_within(self, fqn: str) -> bool:
        """Whether rows depend on each other in the code of a module or of one of its parts."""
        name = self._named(fqn)
        return any(f"{region}.".startswith(f"{name}.") for region in self.regions)

    def as_patterns(self) -> RowCoupling:
        """Return the same for a model with more layers of the same kinds."""
        return RowCoupling(
            regions={generalize(fqn): why for fqn, why in self.regions.items()},
            module_rows={
                (generalize(fqn), form): b for (fqn, form), b in self.module_rows.items()
            },
            of_patterns=True,
            given=self.given,
            returned=self.returned,
            written=frozenset(map(generalize, self.written)),
            kept=frozenset(map(generalize, self.kept)),
            rows_read=frozenset(map(generalize, self.rows_read)),
            added=frozenset(map(generalize, self.added)),
            apart=None if self.apart is None else self.apart.as_patterns(),
            fails=self.fails,
            of_graphs=self.of_graphs,
            of_elements=frozenset(map(generalize, self.of_elements)),
            in_lists=self.in_lists,
            ratios=self.ratios,
        )

    def is_written(self, fqn: str) -> bool:
        """Whether forward writes to a parameter."""
        return self._named(fqn) in self.written

    def is_added(self, fqn: str) -> bool:
        """Whether rows add to a buffer, which is summed over ranks."""
        return self._named(fqn) in self.added

    def reason(self, fqn: str) -> str:
        """Return how it was seen that rows depend on each other in a region."""
        return self.regions[self._named(fqn)]

    def rows_of_module(self, fqn: str, tree: Any) -> ModuleRows | None:
        """Return where the rows are for a call with ``tree``, None if none like it was seen."""
        return self.module_rows.get((self._named(fqn), structure(tree)))

    def names(self, fqns: Sequence[str]) -> list[str]:
        """Return which modules of a model are regions, or have rows at known dims."""
        known = {*self.regions, *(name for name, _ in self.module_rows)}
        return [fqn for fqn in fqns if self._named(fqn) in known]

    def _named(self, fqn: str) -> str:
        return generalize(fqn) if self.of_patterns else fqn


NOWHERE = RowCoupling()


def _of_packed(packed: PackedRows, leaves: Sequence[Any], index: int, to_cut: bool) -> Rows:
    if isinstance(packed, Bounds):
        return Rows(packed.dim, bounds=packed.kind)
    try:
        lengths = packed.lengths(leaves, index)
    except PackedRowsError:
        if to_cut:
            raise
        lengths = None
    return Rows(0, lengths=() if packed.is_even else lengths, is_optional=packed.is_optional)


def may_be_uneven(rows: Sequence[Rows | None] | None, num_ranks: int) -> bool:
    """Whether rows of a batch, divided over some ranks, may have other numbers of elements.

    A rank does not know what other ranks' rows have.
    """
    lengths = [each.lengths for each in rows or () if each is not None and each.lengths != ()]
    return any(num_ranks > 1 or each is None or len({*each}) > 1 for each in lengths)


def joined(found: Sequence[RowCoupling]) -> RowCoupling:
    """Return where rows depend on each other for any of several ranks, with other values."""
    regions: dict[str, str] = {}
    module_rows: dict[tuple[str, str], list[ModuleRows]] = {}
    for each in found:
        regions |= {fqn: why for fqn, why in each.regions.items() if fqn not in regions}
        for at, rows in each.module_rows.items():
            module_rows.setdefault(at, []).append(rows)
    clear = {
        at: _of_region(several[0]) if at[0] in regions else several[0]
        for at, several in module_rows.items()
        if len({_of_region(x) if at[0] in regions else x for x in several}) == 1
    }
    given = {each.given for each in found}
    returned = {each.returned for each in found}
    ratios = {each.ratios for each in found if each.ratios}
    if len(ratios) > 1:
        regions.setdefault(
            "", "for some values it divides sums by sums that it does not for others"
        )
    return RowCoupling(
        regions,
        clear,
        any(each.of_patterns for each in found),
        given.pop() if len(given) == 1 else None,
        returned.pop() if len(returned) == 1 else None,
        frozenset[str]().union(*(each.written for each in found)),
        frozenset[str]().union(*(each.kept for each in found)),
        frozenset[str]().union(*(each.rows_read for each in found)),
        frozenset[str]().union(*(each.added for each in found)),
        joined([each.apart or each for each in found]) if any(e.apart for e in found) else None,
        any(each.fails for each in found),
        any(each.of_graphs for each in found),
        frozenset[str]().union(*(each.of_elements for each in found)),
        any(each.in_lists for each in found),
        max(ratios, key=len, default=()),
    )


def _of_region(rows: ModuleRows) -> ModuleRows:
    """Return the rows of a region, of which numbers are those of all rows, whatever was seen."""
    outputs = (None if isinstance(x, MeanOfParts | NotOfParts) else x for x in rows.outputs)
    return replace(rows, outputs=tuple(outputs))


def structure(tree: Any) -> str:
    """Return what tells the forms of call of one module apart: its leaves, without sizes."""
    return " ".join(
        f"{leaf.dim()}d" if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in pytree.tree_leaves(tree)
    )


def rows_dim(whole: Sequence[int], part: Sequence[int], num_parts: int) -> int | None:
    """Return the one dim along which a shape is ``num_parts`` times another one, if there is."""
    if len(whole) != len(part):
        return None
    longer = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if len(longer) != 1 or whole[longer[0]] != num_parts * part[longer[0]]:
        return None
    return longer[0]


def part_of_rows(whole: Tensor, rows: Rows, part: int, num_parts: int, num_rows: int) -> Tensor:
    """Return one part's rows of a tensor that holds all ``num_rows``."""
    if rows.outermost:
        length = whole.shape[rows.dim] // num_parts
        return whole.narrow(rows.dim, part * length, length)
    few = num_rows // num_parts
    inner = whole.unflatten(rows.dim, (-1, num_rows)).narrow(rows.dim + 1, part * few, few)
    return inner.flatten(rows.dim, rows.dim + 1)


def packed_as(found: RowCoupling, dims: RowDims) -> RowCoupling:
    """Return what was found with the packed tensors of a call told, where there are some."""
    packed = {index: rows for index, rows in dims if isinstance(rows, PackedRows)}
    if not packed or found.given is None:
        return found
    told = tuple(packed.get(index, rows) for index, rows in enumerate(found.given))
    apart = None if found.apart is None else packed_as(found.apart, dims)
    return replace(found, given=told, apart=apart)


TRANSFORMED = (
    "rows of the batch depend on each other in code that transforms a function by torch.vmap or "
    "torch.func, which cannot be done to tensors of all ranks: differentiate by "
    "torch.autograd.grad, transform what is of one row each, or use data_parallel.size 1"
)


def unclear_rows(found: RowCoupling, length: int, other: RowCoupling, other_length: int) -> str:
    return (
        "it cannot be told which dim of a call's tensors the rows of the batch are: if the one of "
        f"length {length}, they depend on each other in {named(found)}; if the one of length "
        f"{other_length}, {named(other) or 'nowhere'}. Give parallelize the data set, whose "
        "batches have rows first, or call the model with tensors that only share the rows, "
        "targets of (batch) for example, and with positions of (1, time); or use "
        "data_parallel.size 1"
    )


def named(found: RowCoupling) -> str:
    return ", ".join(f"{fqn or 'the model'!r} ({why})" for fqn, why in found.regions.items())


def with_regions_of(found: RowCoupling, other: RowCoupling) -> RowCoupling:
    """Return both; where rows lie, the first one knows better."""
    if not other.regions and not other.added and other.apart is None:
        return found
    module_rows = {
        at: each for at, each in other.module_rows.items() if at not in found.module_rows
    }
    said = {"given": found.given, "returned": found.returned}
    return joined([found, replace(other, module_rows=module_rows, **said)])
