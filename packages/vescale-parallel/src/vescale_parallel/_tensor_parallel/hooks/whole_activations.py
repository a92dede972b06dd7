"""Activations as one device has them, made of what a rank has of them, and back.

[Note: what hooks see] Code in a region computes with a rank's heads or features, and along a
sharded sequence with its positions. It is the model's own, and was proven to mean that. A hook is
nobody's who knows: a mean over features that it adds to the loss is another number on every rank.
So hooks are given whole activations. The conversions are those of regions, told by two placements:
that of the values, and that of the gradient. Every rank runs the same hook on the same numbers, so
a gradient that comes back from a hook is whole on every rank, and each takes its own part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._tensor_parallel.chunks import lengths_within, part_sizes, parts_of
from vescale_parallel._tensor_parallel.communicators import Ranks
from vescale_parallel._tensor_parallel.conversions import convert
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import plain_gradient

from .axis import Conversion, HookedCall, Slot, Unknown, is_plain


@dataclass(frozen=True)
class Layout:
    """How an activation lies over tensor-parallel ranks.

    Attributes:
        value: Its values.
        gradient: Its gradient, of all that reads it.
    """

    value: Placement
    gradient: Placement

    @property
    def is_whole(self) -> bool:
        """Whether a rank has what one device has."""
        return self.value == self.gradient == Replicate()

    @property
    def is_known(self) -> bool:
        """Whether there is a conversion to the whole."""
        if isinstance(self.value, Shard | InterleavedShard):
            return self.gradient == self.value
        return {self.value, self.gradient} <= {Replicate(), Partial()} and (
            Replicate() in (self.value, self.gradient)
        )


# Of every leaf that is a tensor, by module and slot; None if it is not known.
Layouts = Mapping[tuple[str, Slot], tuple[Layout | None, ...]]
# Of tensors in attributes, by module and name; None if unknown, or in a container.
KeptLayouts = Mapping[tuple[str, str], Layout | None]


class _OnFirst(torch.autograd.Function):
    """What the first rank has, and zeros on the others: forward, or of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, forward: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks, ctx.forward = ranks, forward
        return _on_first(x, ranks) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad if ctx.forward else _on_first(grad, ctx.ranks), None, None


def _on_first(x: Tensor, ranks: Ranks) -> Tensor:
    return torch.zeros_like(x) if ranks.rank > 0 else x.clone()


def to_whole(x: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """Return an activation as one device has it; every rank must call this.

    Raises:
        ValueError: If its shards have other lengths than ``torch.chunk`` gives them.
    """
    if layout.value == Partial():
        return convert(x, ranks, "sum", "none")
    if layout.gradient == Partial():
        return _first(x, ranks, forward=False)
    if not isinstance(layout.value, Shard | InterleavedShard):
        return x
    dim, parts = layout.value.dim, parts_of(layout.value)
    whole = convert(x, ranks, "gather", "keep", dim, _whole_length(x, dim, ranks))
    if parts == 1:
        return whole
    own = lengths_within(parts, x.shape[dim])
    of_ranks = [rank.split(own, dim) for rank in whole.split(x.shape[dim], dim)]
    return torch.cat([piece for part in zip(*of_ranks, strict=True) for piece in part], dim)


def from_whole(whole: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """Return what this rank has of an activation that all ranks have whole."""
    if layout.value == Partial():
        return _first(whole, ranks, forward=True)
    if layout.gradient == Partial():
        return convert(whole, ranks, "none", "sum")
    if not isinstance(layout.value, Shard | InterleavedShard):
        return whole
    dim, parts = layout.value.dim, parts_of(layout.value)
    if parts != 1:
        lengths = lengths_within(parts, whole.shape[dim])
        pieces = [part.chunk(ranks.size, dim) for part in whole.split(lengths, dim)]
        whole = torch.cat([piece for rank in zip(*pieces, strict=True) for piece in rank], dim)
    return convert(whole, ranks, "keep", "gather", dim, whole.shape[dim])


def _first(x: Tensor, ranks: Ranks, *, forward: bool) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _OnFirst.apply(x, ranks, forward)  # pyright: ignore[reportReturnType]: apply is untyped
    return _on_first(x, ranks) if forward else x


class FindsLayouts(Protocol):
    """Knows how what hooks are given lies over ranks."""

    def layouts(self, call: HookedCall) -> Layouts:
        """Return it for a call."""
        ...


@dataclass(frozen=True)
class _OverRanks:
    layout: Layout
    ranks: Ranks

    def to_whole(self, x: Tensor) -> Tensor:
        return _with_plain_gradient(to_whole(x, self.layout, self.ranks))

    def from_whole(self, whole: Tensor) -> Tensor:
        return from_whole(whole, self.layout, self.ranks)


class OverTensorParallel:
    """The tensor-parallel ranks as hooks see them, on one of them.

    Args:
        ranks: The ranks.
        finds: Knows how activations lie over them.
    """

    def __init__(self, ranks: Ranks, finds: FindsLayouts) -> None:
        self._ranks, self._finds = ranks, finds
        self._layouts: Layouts = {}

    def learn(self, call: HookedCall) -> None:
        self._layouts = self._finds.layouts(call)

    def sends(self, fqn: str, slots: Collection[Slot]) -> bool:
        layouts = (x for slot in slots for x in self._layouts.get((fqn, slot), ()))
        return any(x is not None and x.value != Replicate() for x in layouts)

    def conversions(
        self, fqn: str, slot: Slot, leaves: Sequence[Any]
    ) -> list[Conversion | Unknown | None]:
        """Return those of leaves, None of what is whole."""
        # Hooks may be given the arguments without those that have names, which are behind.
        known = self._layouts.get((fqn, slot), ())[: len(leaves)]
        layouts = known if len(known) == len(leaves) else (None,) * len(leaves)
        return [self._conversion(*each) for each in zip(leaves, layouts, strict=True)]

    def _conversion(self, x: Any, layout: Layout | None) -> Conversion | Unknown | None:
        if not is_plain(x):
            return None
        if layout is None:
            return Unknown()
        if not layout.is_whole:
            return _OverRanks(layout, self._ranks)
        _with_plain_gradient(x)
        return None


def _with_plain_gradient(x: Tensor) -> Tensor:
    """Let a hook add what it keeps of a tensor to a loss of logits that are sharded."""
    if torch.is_grad_enabled() and x.requires_grad:
        x.register_hook(plain_gradient)
    return x


def _whole_length(x: Tensor, dim: int, ranks: Ranks) -> int:
    """Return how long a dim is of which this rank has a shard."""
    own = torch.tensor([x.shape[dim]], device=x.device)
    sizes: list[int] = ranks.all_gather(own, 0, ranks.size).tolist()
    if sizes != part_sizes(sum(sizes), ranks.size):
        raise ValueError(f"ranks have {sizes} of a dim, which torch.chunk does not make")
    return sum(sizes)
