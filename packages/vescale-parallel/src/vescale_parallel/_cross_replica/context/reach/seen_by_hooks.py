"""Slices that hooks are given whole, of the sequence or of its gradient.

See [Note: what hooks see]. Gradients are those of [Note: whole and sliced]: of what is on slices,
they are larger than one device's by the number of ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._cross_replica.context.conversions import (
    gather_slices,
    sum_of_ranks,
    with_whole_gradient,
)
from vescale_parallel._cross_replica.context.proof import DrawsBy, run_on_ranks
from vescale_parallel._cross_replica.context.sliced.tensor import SlicedTensor
from vescale_parallel._cross_replica.context.slices import ContextRanks, Method, SequenceSlices
from vescale_parallel._cross_replica.context.slicing import Slicing
from vescale_parallel._model.blocks import alike_parameters
from vescale_parallel._model.copies import discard
from vescale_parallel._model.random_copies import random_copy, sharing_copy
from vescale_parallel._tensor_parallel.hooks.axis import (
    Conversion,
    HookedCall,
    Slot,
    Unknown,
    is_plain,
)
from vescale_parallel._trace.generators import (
    set_generators,
    states_of_generators,
    untouched_generators,
)
from vescale_parallel._verify.calls.flags import set_flags
from vescale_parallel._verify.compared_results import close, largest_of
from vescale_parallel._verify.compared_runs import L, run_once
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.region import Given
from vescale_parallel._verify.scaled_down_model import is_large
from vescale_parallel._verify.whole_model import whole_region


@dataclass(frozen=True)
class Sliced:
    """How a leaf of what a hook is given lies over the ranks of a sequence.

    Attributes:
        dim: The one along the sequence; None if every rank has all of it.
        is_folded: Whether the sequence is within that dim, as in (batch * sequence).
        is_gradient: Whether it is a gradient of slices.
        has_parts: Of what every rank has whole, whether its gradient is the mean of the ranks'; of
            such a gradient, that it is.
    """

    dim: int | None
    is_folded: bool = False
    is_gradient: bool = False
    has_parts: bool = False


SlicedLeaves = Mapping[tuple[str, Slot], tuple[Sliced | None, ...]]


class FindsSlices(Protocol):
    """Knows how what hooks are given lies over the ranks of a sequence."""

    def seen_slices(self, call: HookedCall) -> SlicedLeaves:
        """Return it for a call."""
        ...


class OverSequence:
    """The ranks that share a sequence as hooks see them, on one of them.

    Args:
        ranks: The ranks.
        finds: Knows how activations lie over them.
        blocks: What runs on slices.
    """

    def __init__(self, ranks: ContextRanks, finds: FindsSlices, blocks: SlicedBlocks) -> None:
        self._ranks, self._finds, self._blocks = ranks, finds, blocks
        self._leaves: SlicedLeaves = {}

    def learn(self, call: HookedCall) -> None:
        """Find how what hooks are given lies, in a call."""
        self._leaves = self._finds.seen_slices(call)

    def sends(self, fqn: str, slots: Collection[Slot]) -> bool:
        """Whether hooks of a module are given slices."""
        leaves = (x for slot in slots for x in self._leaves.get((fqn, slot), ()))
        known = (x for x in leaves if x is not None)
        return any(x.dim is not None or (x.has_parts and x.is_gradient) for x in known)

    def conversions(
        self, fqn: str, slot: Slot, leaves: Sequence[Any]
    ) -> list[Conversion | Unknown | None]:
        """Return those of leaves, None of what is whole."""
        known = self._leaves.get((fqn, slot), ())[: len(leaves)]
        of_leaves = known if len(known) == len(leaves) else (None,) * len(leaves)
        return [self._conversion(*each) for each in zip(leaves, of_leaves, strict=True)]

    def _conversion(self, x: Any, lies: Sliced | None) -> Conversion | Unknown | None:
        if isinstance(x, SlicedTensor):
            return Unknown() if x.along.is_part else _OfSlicedTensor(x)
        if not is_plain(x) or not self._blocks.slicing.stacks:
            return None
        if lies is None or not self._fits(x, lies):
            return Unknown()
        if lies.dim is not None:
            return _OverSlices(lies, self._blocks.slices, self._ranks)
        if not lies.has_parts:
            return None
        return _MeanOfParts(self._ranks) if lies.is_gradient else _Shared(self._ranks)

    def _fits(self, x: Tensor, lies: Sliced) -> bool:
        if lies.dim is None:
            return True
        own = self._blocks.slices.sizes[self._ranks.rank]
        return x.shape[lies.dim] % own == 0 and (lies.is_folded or x.shape[lies.dim] == own)


@dataclass(frozen=True)
class _OverSlices:
    lies: Sliced
    slices: SequenceSlices
    ranks: ContextRanks

    def to_whole(self, x: Tensor) -> Tensor:
        assert self.lies.dim is not None
        unfolded, dim = self._unfolded(x, self.slices.sizes[self.ranks.rank])
        whole = gather_slices(unfolded, dim, self.slices, self.ranks)
        whole = whole.flatten(dim - 1, dim) if self.lies.is_folded else whole
        return whole / self.ranks.size if self.lies.is_gradient else whole

    def from_whole(self, whole: Tensor) -> Tensor:
        if self.lies.is_gradient:
            whole = whole * self.ranks.size
        else:
            whole = with_whole_gradient(whole, self.ranks)
        unfolded, dim = self._unfolded(whole, self.slices.length)
        part = self.slices.part(unfolded, dim, self.ranks.rank)
        return (part.flatten(dim - 1, dim) if self.lies.is_folded else part).contiguous()

    def _unfolded(self, x: Tensor, length: int) -> tuple[Tensor, int]:
        dim = self.lies.dim or 0
        return (x.unflatten(dim, (-1, length)), dim + 1) if self.lies.is_folded else (x, dim)


@dataclass(frozen=True)
class _Shared:
    """Of what every rank has whole, and reads for its slice."""

    ranks: ContextRanks

    def to_whole(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def from_whole(self, whole: Tensor) -> Tensor:
        return with_whole_gradient(whole, self.ranks)


@dataclass(frozen=True)
class _MeanOfParts:
    """Of a gradient of what every rank has whole, and read for its slice."""

    ranks: ContextRanks

    def to_whole(self, x: Tensor) -> Tensor:
        gathered = self.ranks.all_gather(x.detach()[None], 0, [1] * self.ranks.size)
        return sum_of_ranks(gathered) / self.ranks.size

    def from_whole(self, whole: Tensor) -> Tensor:
        return whole


@dataclass(frozen=True, eq=False)
class _OfSlicedTensor:
    given: SlicedTensor

    def to_whole(self, x: Tensor) -> Tensor:
        return self._over_slices().to_whole(self.given.local)

    def from_whole(self, whole: Tensor) -> Tensor:
        return SlicedTensor.of(self._over_slices().from_whole(whole), self.given.along)

    def _over_slices(self) -> _OverSlices:
        along = self.given.along
        return _OverSlices(Sliced(along.dim, along.count > 1), along.slices, along.ranks)


def heard_on_slices(
    model: nn.Module,
    named: Mapping[str, Any],
    slicing: Slicing,
    size: int,
    listener: Callable[[nn.Module, bool], L],
    *,
    draws_by: DrawsBy,
    method: Method,
) -> tuple[L, list[L], list[SequenceSlices]]:
    """Return what listeners hear of a model on one device, and on slices on each rank.

    Args:
        model: Whole, perhaps without values.
        named: The arguments of a call.
        slicing: What is sliced in calls of this form.
        size: How many ranks share a sequence.
        listener: Returns one, given the model and whether it is for the one device.
        draws_by: Makes what has the modules of a rank draw its part.
        method: How ranks attend.

    Returns:
        Those, and the slices of every stack that ran.

    Raises:
        NotSlicedError: If a rank raises.
        ShortSequenceError: If there is too little of the sequence.
    """
    with untouched_generators(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = whole_region(model, named, {})
        base = random_copy(model, alike=alike_parameters(model) if is_large(model) else None)
        set_flags(base, model)
        run = functools.partial(run_once, with_chance=bool(slicing.draws))
        given, begin = Given([*region.inputs], region.spec, []), states_of_generators()
        first, whole = sharing_copy(base), sharing_copy(base)
        given = replace(given, cotangents=[*map(torch.randn_like, run(first, given).outputs)])
        discard(first)
        of_whole, of_ranks = listener(model, True), [listener(model, False) for _ in range(size)]
        of_whole.listen(whole)
        of_whole.listen_behind(whole)
        set_generators(begin)
        run(whole, given)
        discard(whole)
        set_generators(begin)
        make = functools.partial(SlicedBlocks, method=method)
        how = size, slicing, make, draws_by, ()
        runs, _ = run_on_ranks(given, base, *how, begin={}, listeners=of_ranks)
        discard(base)
    give_memory_back()
    return of_whole, of_ranks, [*runs[0].slices.values()]


def part_of(x: Tensor) -> Tensor:
    """Return what a rank has of a tensor."""
    return x.local if isinstance(x, SlicedTensor) else x


@dataclass(frozen=True)
class JudgesSlices:
    """Says how a leaf lies over ranks: along which of some sequences, if along any."""

    slices: Sequence[SequenceSlices]

    def __call__(
        self, whole: Tensor, parts: Sequence[Tensor], grads: Sequence[Tensor | None], slot: Slot
    ) -> Sliced | None:
        """Return it; None if in an unknown way."""
        is_gradient = slot in ("grad_input", "grad_output")
        values = [part / len(parts) for part in parts] if is_gradient else [*parts]
        for lies, shards in self._candidates(whole):
            if _are(values, shards, whole):
                found = replace(lies, is_gradient=is_gradient)
                return found if is_gradient or self._has_gradient(grads, lies) else None
        if not _are(parts, [whole] * len(parts), whole):
            is_mean = is_gradient and _is_mean([whole, *parts])
            return Sliced(None, is_gradient=True, has_parts=True) if is_mean else None
        if self._has_gradient(grads, Sliced(None)):
            return Sliced(None)
        return Sliced(None, has_parts=True) if _is_mean(grads) else None

    def _candidates(self, whole: Tensor) -> list[tuple[Sliced, list[Tensor]]]:
        found: list[tuple[Sliced, list[Tensor]]] = []
        for slices in self.slices:
            num_ranks = range(len(slices.ranges))
            for dim, length in enumerate(whole.shape):
                if length == slices.length:
                    shards = [slices.part(whole, dim, rank) for rank in num_ranks]
                    found.append((Sliced(dim), shards))
                elif length and length % slices.length == 0:
                    unfolded = whole.unflatten(dim, (-1, slices.length))
                    shards = [slices.part(unfolded, dim + 1, rank) for rank in num_ranks]
                    shards = [shard.flatten(dim, dim + 1) for shard in shards]
                    found.append((Sliced(dim, is_folded=True), shards))
        return found

    def _has_gradient(self, grads: Sequence[Tensor | None], lies: Sliced) -> bool:
        """Whether ranks have the gradient of what lies so, or there is none."""
        whole, *parts = grads
        given = [part for part in parts if part is not None]
        if whole is None:
            return not any(bool(part.any()) for part in given)
        if lies.dim is None:
            return len(given) == len(parts) and _are(given, [whole] * len(parts), whole)
        parts = [torch.zeros(()) if part is None else part / len(parts) for part in parts]
        shards = [shards for like, shards in self._candidates(whole) if like == lies]
        return any(_are(parts, each, whole) for each in shards)


def _are(parts: Sequence[Tensor], shards: Sequence[Tensor], whole: Tensor) -> bool:
    largest = largest_of(whole)
    return all(close(one, other, largest) for one, other in zip(parts, shards, strict=True))


def _is_mean(grads: Sequence[Tensor | None]) -> bool:
    whole, *parts = grads
    if whole is None or any(part is None or part.shape != whole.shape for part in parts):
        return False
    mean = torch.stack([part for part in parts if part is not None]).mean(0)
    return close(mean, whole, largest_of(whole))
