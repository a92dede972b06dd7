"""Tensors of which every rank that shares a sequence has the slice of its positions.

[Note: sliced tensors] What leaves the last block is a tensor of the whole shape that holds this
rank's slice. What the model makes of it token by token, logits and losses above all, is computed
on the slice (:mod:`.rules`), and a sum over positions is summed over ranks. Whatever is not
known to be so gathers the whole first, as if it had been gathered behind the block, so that code
of any kind computes what it does on one device. All ranks run the same code, so all gather.

Gradients are those of [Note: whole and sliced]: what comes from slices to something that is whole,
a sum or a gathered tensor, multiplies them by the number of ranks.

Autograd knows the slice, not the tensor around it. A function that takes the tensor apart by
itself (:class:`torch.autograd.Function`) would lose its gradient; it meets an error in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel._cross_replica.context.conversions import gather_slices, sum_of_ranks
from vescale_parallel._cross_replica.context.slices import ContextRanks, SequenceSlices
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import Returned
from vescale_parallel._torch_private import (
    is_in_backward,
    make_wrapper,
    pytree,
    unseen_functions,
    version_of,
)

WHOLE = "use context_parallel.outputs 'whole', with which the head and the loss run on all of it"


class WholeError(ValueError):
    """Code in a block would compute on whole sequences on every rank.

    Attributes:
        why: Which functions.
    """

    def __init__(self, functions: str, module: str) -> None:
        self.why = f"every rank would compute {functions} of whole sequences"
        super().__init__(
            f"context_parallel: in {module!r} {self.why}; compute what it returns position by "
            "position, or leave context_parallel out of the plan"
        )


@dataclass(eq=False)
class Call:
    """One call of a model, in which all ranks run the same code, and so may gather.

    Attributes:
        limit: Elements of the activation that left the last block.
        note: Is told of a tensor with more elements that had to be gathered.
        module: The one in the blocks that is called; empty behind them.
        is_over: Whether it has returned.
        gathered_by: Names of functions that got whole tensors.
        views: Of whole tensors that were gathered, each with the function that returned it and how
            often it had been written to.
    """

    limit: int
    note: Callable[[], None]
    module: str = ""
    is_over: bool = False
    gathered_by: list[str] = field(default_factory=list[str])
    views: list[tuple[str, Tensor, int]] = field(default_factory=list[tuple[str, Tensor, int]])

    def note_views(self, function: str, made: Any, of: Any) -> None:
        """Remember what a function returned that has the memory of whole tensors."""
        memory = {_memory(x) for x in pytree.tree_leaves(of) if type(x) is Tensor and x.numel()}
        for x in pytree.tree_leaves(made):
            if type(x) is Tensor and x.numel() and _memory(x) in memory:
                self.views.append((function, x, version_of(x)))

    def end(self) -> None:
        """Say that it has returned.

        Raises:
            ValueError: If a view was written to, which on one device is a write to the tensor.
        """
        self.is_over = True
        views, self.views = self.views, []
        written = [function for function, x, version in views if version_of(x) != version]
        if written:
            where = f"in {self.module!r}" if self.module else "behind the blocks"
            raise ValueError(
                f"context_parallel: {where} code writes to what {written[0]!r} returned, a view "
                "of a tensor of which a rank has a slice; compute a new one, as torch.where does"
            )

    def refuse_behind_it(self) -> None:
        """Refuse what ranks would have to do together, and one alone may ask for."""
        if self.is_over and is_in_backward():
            raise ValueError(
                "context_parallel: expected torch.utils.checkpoint around the module that "
                "multiplies queries with keys, or around more, got it within that module; "
                "checkpoint the module, or use recompute='full'"
            )
        if self.is_over and self.module:
            raise ValueError(
                f"context_parallel: {self.module!r} keeps a tensor of which a rank has a slice, "
                "and other code reads it; have the module return it"
            )
        if self.is_over:
            raise ValueError(
                "context_parallel: a tensor of which a rank has a slice was kept beyond the call "
                "of the model, as a hook may do, where reading it would wait for other ranks; "
                f"keep to_local(), this rank's slice, or {WHOLE}"
            )


@dataclass(frozen=True, eq=False)
class Along:
    """Where the sequence is in a tensor, and what of it a rank has.

    Attributes:
        dim: The one along the sequence.
        count: How often it is in that dim, as in (batch * sequence).
        slices: Of what is left of the sequence; a rank may have nothing of it.
        ranks: Those that share it.
        call: Of the model, in which it came about.
        compute: Calls functions that are given such a tensor.
        in_blocks: Whether it is in a block, where what is whole has another part of its gradient
            on each rank, and ranks draw their parts.
    """

    dim: int
    count: int
    slices: SequenceSlices
    ranks: ContextRanks
    call: Call
    compute: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
    in_blocks: bool = False
    is_part: bool = False

    @property
    def own(self) -> int:
        """How long that dim is on this rank."""
        return self.count * self.slices.sizes[self.ranks.rank]

    @property
    def length(self) -> int:
        """How long it is on one device."""
        return self.count * self.slices.length

    def at(self, dim: int, count: int | None = None) -> Along:
        """Return the same of a tensor that has the sequence in another dim."""
        return replace(self, dim=dim, count=self.count if count is None else count)

    def is_like(self, other: Along) -> bool:
        """Whether ranks have the same of two sequences, in whatever dim."""
        is_alike = self.is_part == other.is_part and self.count == other.count
        return is_alike and self.slices.is_like(other.slices)

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor that has the sequence in ``dim``."""
        if self.count == 1:
            return self.slices.part(x, dim, self.ranks.rank)
        unfolded = x.unflatten(dim, (self.count, self.slices.length))
        return self.slices.part(unfolded, dim + 1, self.ranks.rank).flatten(dim, dim + 1)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape on one device of what has this one here."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


class SlicedTensor(Tensor):
    """A tensor of the whole sequence that holds this rank's slice; see [Note: sliced tensors].

    Attributes:
        local: This rank's slice.
        along: Where the sequence is in it.
    """

    local: Tensor
    along: Along

    def __new__(cls, local: Tensor, along: Along) -> SlicedTensor:
        shape = along.whole_shape(local.shape)
        made = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.along = local, along
        return made

    @staticmethod
    def of(local: Tensor, along: Along) -> SlicedTensor:
        """Return the tensor of which a rank has this slice."""
        with unseen_functions():
            if not (torch.is_grad_enabled() and local.requires_grad):
                return SlicedTensor(local, along)
            made: Any = _TakenApart.apply(local, along)
            return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, SlicedTensor)]
        first = next((x for x in given if x.along.is_part), given[0])
        return first.along.compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = gathered((args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def is_row_wise(self) -> bool:
        """Whether its last dim is one of features."""
        return self.along.dim < self.local.ndim - 1

    def of_each_position(self, function: Callable[[Tensor], Tensor]) -> SlicedTensor:
        """Return what a function computes of it, position by position: that of the slice."""
        return SlicedTensor.of(function(self.local), self.along)

    def to_local(self) -> Tensor:
        """Return this rank's slice."""
        return self.local.to_local() if isinstance(self.local, DTensor) else self.local

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SlicedTensor(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"


class _TakenApart(torch.autograd.Function):
    """Makes autograd come here if a function takes a sliced tensor without its slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, along: Along) -> SlicedTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SlicedTensor(local, along)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "context_parallel: an autograd.Function behind the blocks, or torch's own of a full "
            "backward hook (register_full_backward_hook) of a module there or of the last block, "
            "was given a tensor of which a rank has a slice, and its gradient cannot be told; "
            f"{WHOLE}"
        )


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def is_sliced(x: Any) -> bool:
    """Whether something is a sliced tensor."""
    return isinstance(x, SlicedTensor)


def gathered(tree: Any) -> Any:
    """Return a structure with whole tensors in the place of sliced ones.

    Every rank of the sequence must call this, if there is one.
    """
    return pytree.tree_map_only(SlicedTensor, whole, tree)


def whole(x: SlicedTensor) -> Tensor:
    """Return the whole of a sliced tensor. Every rank must call this."""
    along, local = x.along, x.local
    shape = along.whole_shape(local.shape)
    if along.is_part:
        raise ValueError(
            f"context_parallel: code in {along.call.module!r} takes the whole of something of "
            "which tensor-parallel ranks have parts, too; set tensor_parallel.sequence to False"
        )
    along.call.refuse_behind_it()
    if torch.Size(shape).numel() > along.call.limit:
        along.call.note()
    if not isinstance(local, DTensor):
        return _whole(local, along)
    mine = _whole(local.to_local(), along)  # cut by vocabulary besides, and stays so
    return DTensor.from_local(mine, local.device_mesh, local.placements, shape=shape)


def _whole(local: Tensor, along: Along) -> Tensor:
    if along.count == 1:
        return gather_slices(local, along.dim, along.slices, along.ranks, sums=along.in_blocks)
    own = along.slices.sizes[along.ranks.rank]
    unfolded = local.unflatten(along.dim, (along.count, own))
    found = gather_slices(unfolded, along.dim + 1, along.slices, along.ranks, sums=along.in_blocks)
    return found.flatten(along.dim, along.dim + 1)


def summed(x: Tensor, along: Along) -> Tensor:
    """Return the sum over ranks, in their order, of what each has. Every rank must call this."""
    along.call.refuse_behind_it()
    plain: Any = Returned.apply(x) if isinstance(x, DTensor) else x
    return SumOverSlices.apply(plain, along.ranks, along.in_blocks)  # pyright: ignore[reportReturnType]: torch's own stub


class SumOverSlices(torch.autograd.Function):
    """The sum over ranks; see [Note: whole and sliced] for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextRanks, in_blocks: bool = False) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.given = ranks, in_blocks
        return _sum_over(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, in_blocks = ctx.given
        return _sum_over(grad, ranks) if in_blocks else grad * ranks.size, None, None


def _sum_over(x: Tensor, ranks: ContextRanks) -> Tensor:
    return sum_of_ranks(ranks.all_gather(x.detach()[None], 0, [1] * ranks.size))
