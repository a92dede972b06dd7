"""Walk the state to fill and the stored tree together: what is read where, what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ._boxes import Part, part_of
from ._dtypes import DTYPES
from ._record import Record
from ._template import SavedTensor, template_of
from ._tree import Json, Stateful, decode, dotted, elements_of, is_reference, items_of, references
from .exceptions import CheckpointError, MismatchError

_MAX_LISTED = 20
_Path = tuple[str | int, ...]


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
    """

    result: dict[str, Any] = field(default_factory=dict[str, Any])
    targets: list[tuple[Part, str]] = field(default_factory=list[tuple[Part, str]])
    stateful: list[tuple[Stateful, Any]] = field(default_factory=list[tuple[Stateful, Any]])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    unfit: list[str] = field(default_factory=list[str])

    def complain(self, *, strict: bool) -> None:
        """Raise MismatchError for all that does not fit together, if anything does not."""
        complaints = [f"does not fit: {text}" for text in self.unfit]
        if strict:
            complaints += [f"missing in the checkpoint: {key}" for key in self.missing]
            complaints += [f"unexpected in the checkpoint: {key}" for key in self.unexpected]
        if complaints:
            more = len(complaints) - _MAX_LISTED
            lines = complaints[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
            advice = "pass strict=False to load the keys that both have" if strict else ""
            raise MismatchError("\n".join(filter(None, [*lines, advice])))


def match(
    state: Mapping[str, Any], record: Record, rank: int, *, strict: bool, cast: bool = False
) -> Matched:
    """Find out what of a checkpoint goes where in ``state``, without changing anything.

    Args:
        state: What to fill.
        record: What there is.
        rank: This process.
        strict: Whether missing and unexpected keys are an error.
        cast: Whether dtypes may differ.

    Raises:
        MismatchError: If shapes or kinds differ, or, when ``strict``, keys are missing or
            unexpected. All are reported together.
    """
    matched = Matched()
    walk = _Walk(record, matched, rank, cast=cast)
    # What is at the top is parts to choose from, but a tensor there is one of many.
    left_out = {
        key for key, node in record.tree.items() if key not in state and not is_reference(node)
    }
    items = [(key, node) for key, node in record.tree.items() if key not in left_out]
    matched.result = walk.mapping(state, items, ())
    matched.complain(strict=strict)
    return matched


class _Walk:
    def __init__(self, record: Record, matched: Matched, rank: int, *, cast: bool) -> None:
        self.rank = rank
        self.cast = cast
        self.record = record
        self.matched = matched

    def node(self, given: Any, node: Json, path: _Path) -> Any:
        """Return what stands in the result for ``given``."""
        if isinstance(given, torch.Tensor):
            return self.tensor(given, node, path)
        if isinstance(given, Stateful):
            filled = self.node(self.template(given, node), node, path)
            self.matched.stateful.append((given, filled))
            return given
        if not _holds_targets(given) and not any(references(node)):
            return decode(node, _no_tensor)
        if isinstance(given, Mapping) and (items := items_of(node)) is not None:
            return self.mapping(given, items, path)
        if isinstance(given, (list, tuple)) and (elements := elements_of(node)) is not None:
            return self.sequence(given, elements, path)
        stored = "tensors" if any(references(node)) else "a value"
        self.matched.unfit.append(
            f"{dotted(path)}: the checkpoint holds {stored}, the given state a "
            f"{type(given).__name__}"
        )
        return given

    def template(self, given: Stateful, node: Json) -> Any:
        saved: dict[str, SavedTensor] = {}
        for path, key in references(node):
            stored = self.record.stored(key)
            saved[path] = SavedTensor(stored.shape, DTYPES[stored.dtype])
        return template_of(given, saved)

    def mapping(
        self, given: Mapping[Any, Any], items: Sequence[tuple[str | int, Json]], path: _Path
    ) -> Any:
        nodes = dict(items)
        result = copy.copy(given) if isinstance(given, MutableMapping) else dict(given)
        for key, item in given.items():
            if key in nodes:
                result[key] = self.node(item, nodes[key], (*path, key))
            else:
                self.matched.missing.append(dotted((*path, key)))
        self.matched.unexpected += [dotted((*path, key)) for key in nodes if key not in given]
        return result

    def sequence(self, given: Sequence[Any], elements: list[Json], path: _Path) -> Any:
        matched = self.matched
        shorter = min(len(given), len(elements))
        matched.missing += [dotted((*path, i)) for i in range(shorter, len(given))]
        matched.unexpected += [dotted((*path, i)) for i in range(shorter, len(elements))]
        items = [
            self.node(item, elements[i], (*path, i)) if i < shorter else item
            for i, item in enumerate(given)
        ]
        return tuple(items) if isinstance(given, tuple) else items

    def tensor(self, given: torch.Tensor, node: Json, path: _Path) -> torch.Tensor:
        key = dotted(path)
        if not is_reference(node):
            self.matched.unfit.append(f"{key}: the checkpoint holds a value, not a tensor")
            return given
        try:
            part = part_of(key, given, self.rank)
        except CheckpointError as error:
            self.matched.unfit.append(str(error))
            return given
        stored = self.record.stored(node["$tensor"])
        same_dtype = self.cast or given.dtype == DTYPES[stored.dtype]
        if tuple(given.shape) != stored.shape or not same_dtype:
            self.matched.unfit.append(
                f"{key}: the checkpoint (file {stored.file}) holds {DTYPES[stored.dtype]} of "
                f"shape {stored.shape}, the given tensor is {given.dtype} of shape "
                f"{tuple(given.shape)}"
            )
            return given
        self.matched.targets.append((part, node["$tensor"]))
        return given


def _holds_targets(given: Any) -> bool:
    if isinstance(given, (torch.Tensor, Stateful)):
        return True
    if isinstance(given, Mapping):
        return any(_holds_targets(item) for item in given.values())
    return isinstance(given, (list, tuple)) and any(_holds_targets(item) for item in given)


def _no_tensor(key: str) -> NoReturn:
    raise AssertionError(f"{key!r} is a tensor in a tree without tensors")
