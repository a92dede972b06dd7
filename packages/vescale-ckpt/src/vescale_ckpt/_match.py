"""Walk the state to fill and the stored tree together: what is read where, what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ._boxes import Part, part_of
from ._dtypes import DTYPES
from ._per_rank import PerRank, row_part
from ._record import Record
from ._selection import Path, Selection, Stored
from ._template import SavedTensor, template_of
from ._tree import (
    Json,
    Stateful,
    decode,
    dotted,
    elements_of,
    is_reference,
    items_of,
    ranks_of,
    references,
)
from .exceptions import CheckpointError, MismatchError

_MAX_LISTED = 20
EVERYTHING = Selection()


@dataclass(slots=True)
class Matched:
    """What a load has to do.

    Attributes:
        result: What to return: the given tensors and objects, and the stored Python values.
        targets: Pairs of this rank's part of a tensor and the stored tensor's key.
        stateful: Objects and the states to give them once the tensors are filled.
        missing: Keys of the given state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the given state lacks.
        unfit: Sentences about keys that both have, but in different shapes or kinds.
        idle: Sentences about patterns that match nothing.
    """

    result: dict[str, Any] = field(default_factory=dict[str, Any])
    targets: list[tuple[Part, str]] = field(default_factory=list[tuple[Part, str]])
    stateful: list[tuple[Stateful, Any]] = field(default_factory=list[tuple[Stateful, Any]])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    unfit: list[str] = field(default_factory=list[str])
    idle: list[str] = field(default_factory=list[str])

    def complain(self, *, strict: bool) -> None:
        """Raise MismatchError for all that does not fit together, if anything does not."""
        complaints = [f"does not fit: {text}" for text in self.unfit]
        if strict:
            complaints += [f"missing in the checkpoint: {key}" for key in self.missing]
            complaints += [f"unexpected in the checkpoint: {key}" for key in self.unexpected]
            complaints += [f"{text} in the checkpoint" for text in self.idle]
        if complaints:
            more = len(complaints) - _MAX_LISTED
            lines = complaints[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
            advice = "pass strict=False to load the keys that both have" if strict else ""
            raise MismatchError("\n".join(filter(None, [*lines, advice])))


def match(
    state: Mapping[str, Any],
    record: Record,
    rank: int,
    *,
    strict: bool,
    num_ranks: int = 1,
    cast: bool = False,
    selection: Selection = EVERYTHING,
) -> Matched:
    """Find out what of a checkpoint goes where in ``state``, without changing anything.

    Args:
        state: What to fill.
        record: What there is.
        rank: This process.
        strict: Whether missing and unexpected keys are an error, and patterns without use.
        num_ranks: How many processes load together.
        cast: Whether dtypes may differ if no kind is lost: integers become floats, but floats
            no integers.
        selection: What of the state to fill, and what the stored keys are called here.

    Raises:
        MismatchError: If shapes or kinds differ, or, when ``strict``, keys are missing or
            unexpected. All are reported together.
    """
    stored = Stored(record.tree, selection)
    matched = Matched(idle=stored.idle)
    walk = _Walk(record, matched, rank, num_ranks, cast=cast, selection=selection, stored=stored)
    # What is at the top is parts to choose from, but a tensor there is one of many.
    left_out = {
        key for key, node in stored.tree.items() if key not in state and not is_reference(node)
    }
    items = [(key, node) for key, node in stored.tree.items() if key not in left_out]
    matched.result = walk.mapping(state, items, ())
    walk.note_unused(state)
    matched.complain(strict=strict)
    return matched


class _Walk:
    def __init__(
        self,
        record: Record,
        matched: Matched,
        rank: int,
        num_ranks: int,
        *,
        cast: bool,
        selection: Selection,
        stored: Stored,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        # Within a PerRank, the row of each stored tensor that this rank reads.
        self.row: int | None = None
        self.cast = cast
        self.selection = selection
        self.record = record
        self.stored = stored
        self.unused = set(stored.moved)
        self.matched = matched

    def node(self, given: Any, node: Json, path: Path) -> Any:
        """Return what stands in the result for ``given``."""
        if isinstance(given, torch.Tensor):
            return self.tensor(given, node, path)
        if isinstance(given, PerRank) or ranks_of(node) is not None:
            return self.per_rank(given, node, path)
        if isinstance(given, Stateful):
            if not self.holds_wanted(node, path):
                return given
            filled = self.node(self.template(given, node, path), node, path)
            self.matched.stateful.append((given, filled))
            return given
        wanted = self.selection.wants(path)
        if self.is_value(given, node, path):
            if wanted:
                return decode(node, _no_tensor)
            if not isinstance(given, Mapping):
                return given
        if isinstance(given, Mapping) and (items := items_of(node)) is not None:
            return self.mapping(given, items, path)
        if isinstance(given, (list, tuple)) and (elements := elements_of(node)) is not None:
            return self.sequence(given, elements, path)
        if wanted:
            stored = "tensors" if any(references(node)) else "a value"
            self.matched.unfit.append(
                f"{dotted(path)}: the checkpoint holds {stored}, the given state a "
                f"{type(given).__name__}"
            )
        return given

    def per_rank(self, given: Any, node: Json, path: Path) -> Any:
        """Return this rank's own value; see [Note: per-rank tensors]."""
        values = ranks_of(node)
        if not self.selection.wants(path):
            return given
        if values is None or not isinstance(given, PerRank):
            side = "the given state" if values is None else "the checkpoint"
            self.matched.unfit.append(f"{dotted(path)}: only {side} has a value per rank")
            return given
        if len(values) not in (1, self.num_ranks):
            self.matched.missing.append(
                f"{dotted(path)} for {self.num_ranks} ranks: each of {len(values)} ranks has "
                f"saved a value of its own"
            )
            return given
        self.row = self.rank if len(values) > 1 else 0
        filled = self.node(given.value, values[self.row], path)
        self.row = None
        return PerRank(filled)

    def is_value(self, given: Any, node: Json, path: Path) -> bool:
        """Return whether neither side has tensors or objects here."""
        if self.stored.holds_below(dotted(path)) or any(references(node)):
            return False
        return not _holds_targets(given)

    def holds_wanted(self, node: Json, path: Path) -> bool:
        """Return whether anything stored at or below ``path`` is wanted."""
        if self.selection.wanted_leaves(node, path):
            return True
        moved = self.stored.moved_below(dotted(path))
        return any(self.selection.wants((*path, key)) for key, _ in moved)

    def template(self, given: Stateful, node: Json, path: Path) -> Any:
        saved: dict[str, SavedTensor] = {}
        moved = self.stored.moved_below(dotted(path))
        found = [*references(node), *((k, m["$tensor"]) for k, m in moved if is_reference(m))]
        for name, key in found:
            if self.selection.wants((*path, name)):
                stored = self.record.stored(key)
                shape = stored.shape if self.row is None else stored.shape[1:]
                saved[name] = SavedTensor(shape, DTYPES[stored.dtype])
        return template_of(given, saved)

    def mapping(
        self, given: Mapping[Any, Any], items: Sequence[tuple[str | int, Json]], path: Path
    ) -> Any:
        nodes = dict(items)
        spelled = {str(key): key for key in nodes}
        result = copy.copy(given) if isinstance(given, MutableMapping) else dict(given)
        for key, item in given.items():
            here = (*path, key)
            name = dotted(here)
            if name in self.stored.moved:
                self.unused.discard(name)
                result[key] = self.node(item, self.stored.moved[name], here)
            elif (stored := key if key in nodes else spelled.get(str(key))) is not None:
                result[key] = self.node(item, nodes.pop(stored), here)
            elif self.stored.holds_below(name):
                result[key] = self.node(item, {}, here)
            else:
                self.note_missing(here)
        for key, node in nodes.items():
            self.note_unexpected(node, (*path, key))
        return result

    def note_missing(self, path: Path) -> None:
        if self.selection.wants(path):
            self.matched.missing.append(dotted(path))

    def note_unexpected(self, node: Json, path: Path) -> None:
        self.matched.unexpected += map(dotted, self.selection.wanted_leaves(node, path))

    def note_unused(self, state: Mapping[str, Any]) -> None:
        """Note what has another name here that the given state does not have."""
        for key in sorted(self.unused):
            if key.split(".")[0] in state:
                self.note_unexpected(self.stored.moved[key], (key,))

    def sequence(self, given: Sequence[Any], elements: list[Json], path: Path) -> Any:
        shorter = min(len(given), len(elements))
        for i in range(shorter, len(given)):
            self.note_missing((*path, i))
        for i in range(shorter, len(elements)):
            self.note_unexpected(elements[i], (*path, i))
        items = [
            self.node(item, elements[i], (*path, i)) if i < shorter else item
            for i, item in enumerate(given)
        ]
        return tuple(items) if isinstance(given, tuple) else items

    def tensor(self, given: torch.Tensor, node: Json, path: Path) -> torch.Tensor:
        key = dotted(path)
        if not self.selection.wants(path):
            return given
        if not is_reference(node):
            self.matched.unfit.append(f"{key}: the checkpoint holds a value, not a tensor")
            return given
        try:
            part = part_of(key, given, self.rank)
        except CheckpointError as error:
            self.matched.unfit.append(str(error))
            return given
        stored = self.record.stored(node["$tensor"])
        dtype = DTYPES[stored.dtype]
        fits = dtype == given.dtype or (self.cast and torch.can_cast(dtype, given.dtype))
        shape = stored.shape
        if self.row is not None and shape[:1] > (self.row,):
            part = row_part(part, shape, self.row)
            shape = shape[1:]
        if tuple(given.shape) != shape or not fits:
            self.matched.unfit.append(
                f"{key}: the checkpoint (file {stored.file}) holds {DTYPES[stored.dtype]} of "
                f"shape {stored.shape}, the given tensor is {given.dtype} of shape "
                f"{tuple(given.shape)}"
            )
            return given
        self.matched.targets.append((part, node["$tensor"]))
        return given


def _holds_targets(given: Any) -> bool:
    if isinstance(given, (torch.Tensor, Stateful, PerRank)):
        return True
    if isinstance(given, Mapping):
        return any(_holds_targets(item) for item in given.values())
    return isinstance(given, (list, tuple)) and any(_holds_targets(item) for item in given)


def _no_tensor(key: str) -> NoReturn:
    raise AssertionError(f"{key!r} is a tensor in a tree without tensors")
