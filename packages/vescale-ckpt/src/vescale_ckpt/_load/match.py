"""Walk the state to fill and the stored tree together: what is read where, what does not fit."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch

from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._format.state_encoding import is_stateful, state_of
from vescale_ckpt._format.state_tree import (
    Json,
    below,
    decode,
    dotted,
    elements_of,
    has_references,
    is_reference,
    items_of,
    key_of,
    ranks_of,
    references,
)
from vescale_ckpt._state.key_filter import KeyFilter, RenamedTree
from vescale_ckpt._state.local_shards import LocalShard, local_shard_of, shard_of_row
from vescale_ckpt._state.optimizer_keys import with_keys_of
from vescale_ckpt._state.state_template import template_of
from vescale_ckpt.exceptions import CheckpointError, MismatchError
from vescale_ckpt.types import PerRank, SavedTensor, Stateful

_MAX_LISTED = 20
_ADVICE = (
    "pass strict=False to load the keys that both have, or name those to load with only=[...]"
)
# Of what both have in different shapes: a head for another number of classes.
_ADVICE_OF_UNFIT = (
    "to keep here what does not fit, name the others with only=[...], as only=['model.encoder'], "
    "which is all that lies below that key"
)
# What wrappers of a module add to the names of its state.
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}
EVERYTHING = KeyFilter()


@dataclass(slots=True)
class Matched:
    """What a load has to do.

    Attributes:
        result: What to return: the given tensors and objects, and the stored Python values.
        targets: Pairs of this rank's shard of a tensor and the stored tensor's key.
        stateful: Keys, objects, and the states to give them once the tensors are filled.
        missing: Keys of the given state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the given state lacks.
        unfit: Sentences about keys that both have, but in different shapes or kinds.
        idle: Sentences about patterns that match nothing.
        kept: Sentences about values that stay as they are, though the checkpoint has some.
    """

    result: dict[str, Any] = field(default_factory=dict[str, Any])
    targets: list[tuple[LocalShard, str]] = field(default_factory=list[tuple[LocalShard, str]])
    stateful: list[tuple[str, Stateful, Any]] = field(
        default_factory=list[tuple[str, Stateful, Any]]
    )
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    unfit: list[str] = field(default_factory=list[str])
    idle: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])

    def complain(self, *, strict: bool) -> None:
        """Raise MismatchError for all that does not fit together, if anything does not."""
        complaints = [f"does not fit: {text}" for text in self.unfit]
        if strict:
            complaints += [f"missing in the checkpoint: {key}" for key in self.missing]
            complaints += [f"unexpected in the checkpoint: {key}" for key in self.unexpected]
            complaints += [f"{text} in the checkpoint" for text in self.idle]
        if complaints:
            lines = [*_shortened(complaints), *self._wrappers()]
            lines += [_ADVICE_OF_UNFIT] if self.unfit else [_ADVICE]
            raise MismatchError("\n".join(lines))

    def _wrappers(self) -> Iterator[str]:
        """Yield what to do if names differ only by what a wrapper of the module adds."""
        for prefix, wrapper in _WRAPPERS.items():
            missing, unexpected = (
                {key.replace(prefix, "") for key in keys}
                for keys in (self.missing, self.unexpected)
            )
            if missing and missing == unexpected and set(self.missing) != set(self.unexpected):
                yield (
                    f"only {prefix!r}, which {wrapper} adds to names, differs: save and load the "
                    f"module within, model.{prefix[:-1]}"
                )

    def report(self, *, strict: bool) -> None:
        """Warn of what stays as it is, and of what only one side has if that is no error."""
        lines = [f"left as it is, not loaded: {text}" for text in self.kept]
        if not strict:
            lines += [f"missing in the checkpoint, left as it is: {key}" for key in self.missing]
            lines += [f"only in the checkpoint, not loaded: {key}" for key in self.unexpected]
            lines += [f"{text} in the checkpoint" for text in self.idle]
        if lines:
            warnings.warn("\n".join(_shortened(lines)), stacklevel=3)


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    return lines[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])


def match(
    state: Mapping[str, Any],
    manifest: Manifest,
    rank: int,
    *,
    strict: bool,
    num_ranks: int = 1,
    cast: bool = False,
    key_filter: KeyFilter = EVERYTHING,
) -> Matched:
    """Find out what of a checkpoint goes where in ``state``, without changing anything.

    When ``strict``, missing and unexpected keys are an error, and patterns without use. ``cast``
    lets dtypes differ if no kind is lost: integers become floats, but floats no integers.

    Raises:
        MismatchError: If shapes or kinds differ, or, when ``strict``, keys are missing or
            unexpected. All are reported together.
    """
    stored = RenamedTree(manifest.tree, key_filter)
    matched = Matched(idle=stored.idle)
    walk = _Walk(
        manifest=manifest,
        matched=matched,
        rank=rank,
        num_ranks=num_ranks,
        cast=cast,
        key_filter=key_filter,
        stored=stored,
        unused=set(stored.moved),
    )
    matched.result = walk.mapping(state, dict(stored.tree.items()), "")
    walk.note_unused()
    walk.forgive_ties()
    matched.complain(strict=strict)
    return matched


@dataclass(slots=True, kw_only=True)
class _Walk:
    manifest: Manifest
    matched: Matched
    rank: int
    num_ranks: int
    cast: bool
    key_filter: KeyFilter
    stored: RenamedTree
    unused: set[str]
    # Within a PerRank, the row of each stored tensor that this rank reads.
    row: int | None = None
    lacking: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def node(self, given: Any, node: Json, path: str) -> Any:
        """Return what stands in the result for ``given``."""
        if isinstance(given, torch.Tensor):
            return self.tensor(given, node, path)
        if isinstance(given, PerRank) or ranks_of(node) is not None:
            return self.per_rank(given, node, path)
        if is_stateful(given):
            if not self.holds_wanted(node, path):
                return given
            if isinstance(given, torch.optim.Optimizer) and not self.stored.holds_below(path):
                node = self.with_keys_of(given, node, path)
            filled = self.node(self.template(given, node, path), node, path)
            self.matched.stateful.append((path, given, filled))
            return given
        wanted = self.key_filter.wants(path)
        if self.is_value(given, node, path):
            if wanted:
                return decode(node, _no_tensor)
            if not isinstance(given, Mapping):
                return given
        if isinstance(given, Mapping) and (items := items_of(node)) is not None:
            return self.mapping(given, dict(items), path)
        if isinstance(given, (list, tuple)) and (elements := elements_of(node)) is not None:
            return self.sequence(given, elements, path)
        if wanted:
            stored = "tensors" if has_references(node) else "a value"
            self.matched.unfit.append(
                f"{path}: the checkpoint holds {stored}, the given state a {type(given).__name__}"
            )
        return given

    def per_rank(self, given: Any, node: Json, path: str) -> Any:
        """Return this rank's own value; see [Note: per-rank tensors]."""
        values = ranks_of(node)
        if not self.key_filter.wants(path):
            return given
        if values is None or not isinstance(given, PerRank):
            side = "the given state" if values is None else "the checkpoint"
            self.matched.unfit.append(f"{path}: only {side} has a value per rank")
            return given
        if len(values) not in (1, self.num_ranks):
            (self.matched.missing if given.strict else self.matched.kept).append(
                f"{path} for {self.num_ranks} ranks: each of {len(values)} ranks has "
                f"saved a value of its own"
            )
            return given
        self.row = self.rank if len(values) > 1 else 0
        filled = self.node(given.value, values[self.row], path)
        self.row = None
        return replace(given, value=filled)

    def is_value(self, given: Any, node: Json, path: str) -> bool:
        """Return whether neither side has tensors or objects here."""
        if self.stored.holds_below(path) or has_references(node):
            return False
        return not _holds_targets(given)

    def holds_wanted(self, node: Json, path: str) -> bool:
        """Return whether anything stored at or below ``path`` is wanted."""
        if self.key_filter.wanted_leaves(node, path):
            return True
        moved = self.stored.moved_below(path)
        return any(self.key_filter.wants(dotted(path, key)) for key, _ in moved)

    def with_keys_of(self, given: torch.optim.Optimizer, node: Json, path: str) -> Json:
        """Return an optimizer's stored state with its keys; those of a ``rename`` stay."""
        try:
            return with_keys_of(given, node)
        except MismatchError as error:
            self.matched.unfit.append(f"{path}: {error}")
            return node

    def template(self, given: Stateful, node: Json, path: str) -> Any:
        saved: dict[str, SavedTensor] = {}
        moved = self.stored.moved_below(path)
        found = [(below(place, path), key) for place, key in references(node, path)]
        found += [(name, key_of(leaf)) for name, leaf in moved if is_reference(leaf)]
        for name, key in found:
            if self.key_filter.wants(dotted(path, name)):
                saved[name] = self.saved_tensor(key)
        is_whole = self.key_filter.wants(path) and not self.stored.holds_below(path)
        structure = partial(decode, node, self.saved_tensor) if is_whole else None
        with state_of(given, path):
            return template_of(given, saved, structure)

    def saved_tensor(self, key: str) -> SavedTensor:
        stored = self.manifest.stored(key)
        shape = stored.shape if self.row is None else stored.shape[1:]
        return SavedTensor(shape, DTYPES[stored.dtype])

    def mapping(self, given: Mapping[Any, Any], nodes: dict[str | int, Json], path: str) -> Any:
        """Return what stands in the result for a dict; uses up ``nodes``."""
        moved = self.stored.moved
        prefix = f"{path}." if path else ""
        # JSON has turned integers into text, or somebody else has.
        spelled = {} if given.keys() <= nodes.keys() else {str(key): key for key in nodes}
        result = copy.copy(given) if isinstance(given, MutableMapping) else dict(given)
        for key, item in given.items():
            here = f"{prefix}{key}"
            if here in moved:
                self.unused.discard(here)
                result[key] = self.node(item, moved[here], here)
            elif (stored := key if key in nodes else spelled.get(str(key))) is not None:
                result[key] = self.node(item, nodes.pop(stored), here)
            elif self.stored.holds_below(here):
                result[key] = self.node(item, {}, here)
            else:
                self.note_missing(here)
                if isinstance(item, torch.Tensor):
                    self.lacking[here] = item
        for key, node in nodes.items():
            self.note_unexpected(node, f"{prefix}{key}")
        return result

    def note_missing(self, path: str) -> None:
        if self.key_filter.wants(path):
            self.matched.missing.append(path)

    def forgive_ties(self) -> None:
        """Take tensors for found that the checkpoint lacks, if what is tied to them is filled.

        HuggingFace's files hold tied weights under one of their names.
        """
        filled = {shard.identity for shard, _ in self.matched.targets} - {None}

        def is_filled(key: str) -> bool:
            try:
                shard = local_shard_of(key, self.lacking[key], self.rank)
            except CheckpointError:
                return False
            if shard.identity is None:  # of some elements, which other ranks have: they can tell
                return math.prod(shard.shape) > 0
            return shard.identity in filled

        self.matched.missing = [
            key for key in self.matched.missing if key not in self.lacking or not is_filled(key)
        ]

    def note_unexpected(self, node: Json, path: str) -> None:
        self.matched.unexpected += self.key_filter.wanted_leaves(node, path)

    def note_unused(self) -> None:
        """Note what has another name here that the given state does not have."""
        for key in sorted(self.unused):
            self.note_unexpected(self.stored.moved[key], key)

    def sequence(self, given: Sequence[Any], elements: list[Json], path: str) -> Any:
        shorter = min(len(given), len(elements))
        for i in range(shorter, len(given)):
            self.note_missing(dotted(path, i))
        for i in range(shorter, len(elements)):
            self.note_unexpected(elements[i], dotted(path, i))
        items = [
            self.node(item, elements[i], dotted(path, i)) if i < shorter else item
            for i, item in enumerate(given)
        ]
        return tuple(items) if isinstance(given, tuple) else items

    def tensor(self, given: torch.Tensor, node: Json, key: str) -> torch.Tensor:
        if not self.key_filter.wants(key):
            return given
        if not is_reference(node):
            self.matched.unfit.append(f"{key}: the checkpoint holds a value, not a tensor")
            return given
        try:
            shard = local_shard_of(key, given, self.rank)
        except CheckpointError as error:
            self.matched.unfit.append(str(error))
            return given
        stored_key = key_of(node)
        stored = self.manifest.stored(stored_key)
        shape, given_shape = stored.shape, shard.shape
        if self.row is not None and shape[:1] > (self.row,):
            shard = shard_of_row(shard, shape, self.row)
            shape = shape[1:]
        is_castable = torch.can_cast(DTYPES[stored.dtype], DTYPES[shard.dtype])
        is_fit = stored.dtype == shard.dtype or (self.cast and is_castable)
        if given_shape != shape or not is_fit:
            remedy = "" if is_fit or not is_castable else "; cast=True converts dtypes"
            self.matched.unfit.append(
                f"{key}: the checkpoint (file {stored.file}) holds {DTYPES[stored.dtype]} of "
                f"shape {stored.shape}, the given tensor is {given.dtype} of shape "
                f"{tuple(given_shape)}{remedy}"
            )
            return given
        self.matched.targets.append((shard, stored_key))
        return given


def _holds_targets(given: Any) -> bool:
    if isinstance(given, (torch.Tensor, PerRank)) or is_stateful(given):
        return True
    if isinstance(given, Mapping):
        return any(_holds_targets(item) for item in given.values())
    return isinstance(given, (list, tuple)) and any(_holds_targets(item) for item in given)


def _no_tensor(key: str) -> NoReturn:
    raise AssertionError(f"{key!r} is a tensor in a tree without tensors")
