"""Conversions as a compiler sees them: collectives that are operators, and leave it no closure.

A compiled program knows of numbers and tensors, so an operator gets its ranks by a number. What it
returns has a shape that follows from its arguments alone: ranks share what compilers keep on disk.
Between ranks an operator does what it does in a program that is not compiled, to the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_parallel._torch_private import version_of

from .chunks import part_sizes
from .communicators import ProcessRanks, Ranks

# What happens to an activation: nothing, or it is summed over ranks, put together from their
# shards, summed and sharded, or sharded.
Kind = Literal["none", "sum", "gather", "scatter", "keep"]

# What enters a region: what happens to it forward, and to its gradient.
_ENTERS: tuple[tuple[Kind, Kind], ...] = (("none", "sum"), ("gather", "scatter"))
# What has entered, by the number of its ranks and its identity: it, when, and as what.
_Entry = tuple["weakref.ref[Tensor]", tuple[object, ...], Tensor]
_entered: dict[int, dict[int, _Entry]] = {}

_numbers = itertools.count()
_ranks: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()


# Processes of this world: a backward pass may run when nobody has the model any more.
_kept: list[tuple[object, ProcessRanks]] = []


def _number_of(ranks: Ranks) -> int:
    """Return the number by which operators find these ranks."""
    number = next(_numbers)
    _ranks[number] = ranks
    if isinstance(ranks, ProcessRanks):
        world = dist.group.WORLD
        _kept[:] = [each for each in _kept if each[0] is world]
        _kept.append((world, ranks))
    return number


@torch.library.custom_op("vescale_parallel::all_reduce", mutates_args=())
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """Return the sum over ranks."""
    return _own_memory(_ranks[ranks].all_reduce(x))


@torch.library.custom_op("vescale_parallel::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, length: int, ranks: int) -> Tensor:
    """Return the shards of all ranks along ``dim``, which is ``length`` long together."""
    return _own_memory(_ranks[ranks].all_gather(x, dim, length))


@torch.library.custom_op("vescale_parallel::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, length: int, ranks: int) -> Tensor:
    """Return this rank's shard along ``dim``, ``length`` long, of the sum over ranks."""
    return _own_memory(_ranks[ranks].reduce_scatter(x, dim))


def _own_memory(received: Tensor) -> Tensor:
    # A view of a buffer that nothing else sees is not one for who gets it.
    return torch.ops.aten._unsafe_view(received.contiguous(), received.shape)


@all_reduce.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape)


@all_gather.register_fake
def _(x: Tensor, dim: int, length: int, ranks: int) -> Tensor:
    return _resized(x, dim, length)


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, length: int, ranks: int) -> Tensor:
    return _resized(x, dim, length)


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


class Place:
    """Which of how many ranks this is, and how operators find them: numbers only."""

    def __init__(self, ranks: Ranks) -> None:
        self.size, self.rank, self.number = ranks.size, ranks.rank, _number_of(ranks)

    def forget(self) -> None:
        """Let go of what has entered."""
        _entered.pop(self.number, None)


def convert_traced(
    x: Tensor, place: Place, there: Kind, back: Kind, dim: int, length: int
) -> Tensor:
    """Do one conversion forward, another backward, in what is being compiled.

    Args:
        x: The activation.
        place: Of this rank.
        there: Forward.
        back: Backward.
        dim: That is sharded; any if none is.
        length: Of the whole dim.
    """
    sizes = part_sizes(length, place.size)
    own, first = sizes[place.rank], sum(sizes[: place.rank])
    if there == "none" and not (torch.is_grad_enabled() and x.requires_grad):
        return x
    convert: Any = torch.ops.vescale_parallel.convert.default
    return convert(x, place.number, there, back, dim, length, own, first)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        number: int,
        there: Kind,
        back: Kind,
        dim: int,
        length: int,
        own: int,
        first: int,
    ) -> Tensor:
        ctx.number, ctx.there, ctx.back, ctx.dim = number, there, back, dim
        ctx.length, ctx.own, ctx.first = length, own, first
        return _run(x, number, there, dim, length, own, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sizes = ctx.dim, ctx.length, ctx.own, ctx.first
        turned = _convert(grad, ctx.number, ctx.back, ctx.there, *sizes)
        return turned, None, None, None, None, None, None, None


def _run(
    x: Tensor, number: int, kind: Kind, dim: int, length: int, own: int, first: int
) -> Tensor:
    if kind == "sum":
        return all_reduce(x, number)
    if kind == "gather":
        return all_gather(x, dim, length, number)
    if kind == "scatter":
        return reduce_scatter(x, dim, own, number)
    if kind == "keep":
        return x.narrow(dim, first, own).clone(memory_format=torch.contiguous_format)
    return x.view_as(x)


def _convert(
    x: Tensor, number: int, there: Kind, back: Kind, dim: int, length: int, own: int, first: int
) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        converted: Any = _Convert.apply(x, number, there, back, dim, length, own, first)
        return converted
    return _run(x, number, there, dim, length, own, first)


def _convert_once(
    x: Tensor, number: int, there: Kind, back: Kind, dim: int, length: int, own: int, first: int
) -> Tensor:
    """Convert; what enters for several layers enters once, as in eager blocks.

    Until something leaves, and for as long as nothing writes into it. Where a backend runs this
    on tensors without values they count writes, too.
    """
    if there in ("sum", "scatter"):
        _entered.pop(number, None)
    if (there, back) not in _ENTERS or x.is_inference():
        return _convert(x, number, there, back, dim, length, own, first)
    key = (version_of(x), torch.is_grad_enabled(), x.requires_grad, there, dim)
    held = _entered.setdefault(number, {})
    source, when, entered = held.get(id(x), (None, None, None))
    if source is None or source() is not x or when != key or entered is None:
        entered = _convert(x, number, there, back, dim, length, own, first)
        held[id(x)] = weakref.ref(x), key, entered
    return entered


# One operator for torch.compile's frontend, which cannot follow autograd functions without a
# warning of its own; behind it, of what compiles a graph, it is what it consists of.
_library = torch.library.Library("vescale_parallel", "FRAGMENT")
_library.define(
    "convert(Tensor x, int ranks, str there, str back, int dim, SymInt length, SymInt own, "
    "SymInt first) -> Tensor"
)
_library.impl("convert", _convert_once, "CompositeImplicitAutograd")
