"""Blocks that compute on slices of a sequence, between code that computes on all of it.

[Note: where a sequence is sliced] What comes before a stack of blocks (embeddings, positions,
rotary tables, masks) and behind it (norm, head, loss) runs on whole sequences on every rank, as on
one device. The first block of a stack takes this rank's slice of its activation, the last one
gathers what it returns. Of what else a block is given, tensors along the sequence are sliced
(rotary tables, positions), and masks stay whole, since attention is of whole sequences. A guess
that is wrong is refused when the model is compared with one device, see :mod:`.proof`; later calls
of that form slice the same dims, also where another one happens to be as long as the sequence.

[Note: attention that runs again] Blocks may run again in backward, by a ``torch.utils.checkpoint``
of the model's own: transformers has it within the forward of a block, below what slices. So what
intercepts attention is around every module that attends, too, and runs again with it. A call of
another length may have run meanwhile: a gradient that arrives at a block brings back the slices of
its call. A checkpoint within the module that attends would leave that out, and is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.inputs import refuse_shut_output
from vescale_parallel._torch_private import is_in_backward, pytree
from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.generators import generator_state
from vescale_parallel._trace.memory_order import NotedOrder, Order

from .attention import HeadsAttention
from .behind import Behind, BehindBlocks
from .conversions import gather_slices, keep_slice
from .draws import DrawKey, DrawnDim, DrawsSlices, WholeDraw
from .intercept import Interception
from .leaving import Leaving, around_one_stack
from .ring_attention import RingAttention
from .slices import ContextRanks, Method, SequenceSlices, sequence_dim
from .written import Combination, Place, WholeWrites

Around = Callable[[], AbstractContextManager[None]]
_ROWS = 3  # dims of activations (batch, sequence, features)
_FEWEST = 2  # positions of a slice: some code takes one position for a step of generation


@dataclass(frozen=True)
class Slicing:
    """What calls of one form slice.

    Attributes:
        stacks: Those whose blocks compute on slices; others run as they are.
        attending: Modules in them that call attention, the innermost ones.
        draws: What one device drew between the beginning and the end of a stack.
        in_attention: Which draw a module has attention make.
        dims: Of the tensors that blocks are given, by block, place among its arguments and number
            of dims: the one along the sequence, None of what stays whole.
        drawn: Of what ranks draw, likewise.
        leaving: What blocks return, or is collected in them, beside their activations.
        behind: What runs on slices behind the last stack.
        written: How what modules in them write becomes that of whole sequences.
    """

    stacks: frozenset[str] = frozenset()
    attending: frozenset[str] = frozenset()
    draws: Mapping[DrawKey, WholeDraw] = field(default_factory=dict[DrawKey, WholeDraw])
    in_attention: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    dims: dict[tuple[str, int, int], int | None] = field(
        default_factory=dict[tuple[str, int, int], "int | None"]
    )
    drawn: dict[DrawKey, DrawnDim] = field(default_factory=dict[DrawKey, DrawnDim])
    leaving: Leaving = field(default_factory=Leaving)
    behind: Behind = field(default_factory=Behind)
    written: Mapping[Place, Combination] = field(default_factory=dict[Place, Combination])

    @cached_property
    def drawing(self) -> frozenset[str]:
        """Modules that draw."""
        return frozenset(fqn for fqn, *_ in self.draws)

    def dim(self, fqn: str, place: int, x: Any, length: int) -> int | None:
        """Return the dim that a block slices of what it is given.

        Raises:
            ValueError: If that dim is not as long as the sequence, as it was.
        """
        if not isinstance(x, Tensor):
            return None
        found = self.dims.setdefault((fqn, place, x.dim()), sequence_dim(x, length))
        if found is not None and x.shape[found] != length:
            raise ValueError(
                f"context_parallel: expected {fqn!r} to be called with a tensor of {length} "
                f"positions in dim {found}, as it was when the model was compared with one "
                f"device, got shape {tuple(x.shape)}"
            )
        return found


class ShortSequenceError(ValueError):
    """A sequence has too few positions to be shared out."""


class SlicedBlocks:
    """The stacks of blocks of a model whose sequences ranks share.

    Attributes:
        slicing: What the call that runs slices.
        stacks: Names of those that may compute on slices.
        behind: What computes on slices behind them.
    """

    def __init__(
        self, ranks: ContextRanks, method: Method = "all_to_all", *, compiled: bool = False
    ) -> None:
        self._ranks = ranks
        self.behind = BehindBlocks(ranks)
        self._writes = WholeWrites(ranks)
        self._method: Method = method
        self._attention = RingAttention(ranks) if method == "ring" else HeadsAttention(ranks)
        self._interception = Interception(self._attention, compiled=compiled)
        self.slicing = Slicing()
        self.stacks: tuple[str, ...] = ()
        self.runs_short_ones = True
        self._open: str | None = None
        self._has_closed = False
        self._begins_with_grad = True
        # Of blocks that are not the first ones, with which a stage of a pipeline may begin.
        self._within: dict[str, str] = {}
        self._state: object = None
        self._intercepted: set[str] = set()

    @property
    def slices(self) -> SequenceSlices:
        """Of the sequence that runs, or ran last."""
        return self._attention.slices

    def install(self, model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
        """Have the blocks of all stacks compute on slices, as :meth:`slice_as` says."""
        self._model, self.stacks = model, tuple(map(name_of, stacks))
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for stack in stacks:
            for fqn in stack:
                block, ends = model.get_submodule(fqn), (fqn == stack[0], fqn == stack[-1])
                block.forward = self._wrapped(block.forward, name_of(stack), fqn, *ends)
                self._intercepted.add(fqn)
            self._within.update(dict.fromkeys(stack[1:], name_of(stack)))
        for fqn in around_one_stack(model, stacks):
            hook = functools.partial(self._gather_collected, fqn)
            model.get_submodule(fqn).register_forward_hook(hook, prepend=True)

    def enter(self, fqn: str, leaves: Sequence[Any]) -> None:
        """Begin a pass within a stack: a stage of a pipeline that is sent its slice.

        ``leaves`` are of what the block is called with, of whole sequences still.
        """
        stack, index = self._within.get(fqn), _activation(leaves)
        if stack is None or index is None or stack not in self.slicing.stacks:
            return
        self._slice_no_short_one(leaves)
        if self.slicing.stacks:
            self._open_stack(stack, leaves[index])

    def slice_as(self, slicing: Slicing) -> None:
        """Compute the next calls so; see [Note: attention that runs again]."""
        self.slicing = slicing
        for fqn in sorted(slicing.attending - self._intercepted):
            module = self._model.get_submodule(fqn)
            is_now = functools.partial(self._attends_by, fqn)
            module.forward = self._interception.of_module(module.forward, is_now, fqn)
            self._intercepted.add(fqn)
        self._writes.watch(self._model, slicing.written, self._written_now)
        self.behind.slice_as(self._model, slicing.behind)

    def _written_now(self) -> tuple[Mapping[Place, Combination], SequenceSlices]:
        return self.slicing.written, self.slices

    @property
    def rank(self) -> int:
        """Which of the ranks that share sequences this is."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks share sequences."""
        return self._ranks.size

    @property
    def repeats_tokens(self) -> bool:
        """Whether blocks run on whole sequences that the first of these ranks has, too."""
        return self._ranks.rank > 0 and self._open is None

    def draw_by(self, draws: DrawsSlices) -> None:
        """Have attention that draws by itself do it so."""
        if isinstance(self._attention, RingAttention):
            self._attention.draw_by(draws, self._draw_in_attention)

    def _draw_in_attention(self) -> tuple[str, int] | None:
        return self.slicing.in_attention.get(self._interception.attending)

    def draws_in(self, fqn: str) -> bool:
        """Whether a module draws where activations are slices."""
        return fqn in self.slicing.drawing

    def drawn(
        self, fqn: str, index: int, shape: tuple[int, ...], order: Order
    ) -> tuple[dict[int, Extent], NotedOrder] | None:
        """Return what of one device's numbers a rank's are, by dim, and how these lie in memory.

        None if activations are whole, or it draws alike.

        Raises:
            ValueError: If they are not drawn as when the model was compared with one device.
        """
        key = fqn, index, len(shape)
        whole = self.slicing.draws.get(key)
        if whole is None:
            if self._open is not None:
                raise ValueError(
                    f"context_parallel: {fqn!r} draws random numbers of shape {shape}, which it "
                    "did not when the model was compared with one device"
                )
            return None
        extent = self._attention.extent()
        if key not in self.slicing.drawn:
            self.slicing.drawn[key] = DrawnDim.between(whole, shape, order, extent)
        noted = self.slicing.drawn[key]
        extents = noted.extents(shape, extent, fqn)
        return (extents, noted.order) if extents else None

    def _attends_by(self, fqn: str) -> bool:
        return fqn in self.slicing.attending

    def as_now(self, others: Callable[[], Around]) -> Callable[[], Around]:
        """Return what makes the context of blocks that run again in backward, with others'."""

        def now() -> Around:
            slicing, slices, around = self.slicing, self.slices, others()

            @contextlib.contextmanager
            def again() -> Iterator[None]:
                latest = self.slicing, self.slices
                self.slicing, self._attention.slices = slicing, slices
                try:
                    with around():
                        yield
                finally:
                    self.slicing, self._attention.slices = latest

            return again

        return now

    def _begin(self, _: nn.Module, args: Any) -> None:
        self._open, self._has_closed = None, False
        self._begins_with_grad = torch.is_grad_enabled()

    def _end(self, _: nn.Module, args: Any, output: Any) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            raise ValueError(
                f"context_parallel: the last block of {stack!r}, which gathers the slices of the "
                "sequence, was not called; it needs all blocks of a stack in every call"
            )

    def _wrapped(
        self, forward: Callable[..., Any], stack: str, fqn: str, is_first: bool, is_last: bool
    ) -> Callable[..., Any]:
        attend = self._interception.of_block(forward, lambda: self._attends_by(fqn), fqn)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_first:
                self._slice_no_short_one(pytree.tree_leaves((args, kwargs)))
            if stack not in self.slicing.stacks:
                return self._returned(forward(*args, **kwargs), None, is_last=False)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            index = _activation(leaves)
            if index is None or leaves[index].dim() < _ROWS:
                raise ValueError(
                    f"context_parallel: expected {fqn!r} to be called with activations (batch, "
                    "sequence, features)"
                )
            if is_first:
                self._open_stack(stack, leaves[index])
            length, own = self.slices.length, self.slices.sizes[self._ranks.rank]
            if not is_first and leaves[index].shape[1] != own:
                raise ValueError(
                    f"context_parallel: {fqn!r} got {leaves[index].shape[1]} positions, not this "
                    f"rank's {own} of {length}; blocks of {stack!r} have to be called in order"
                )
            for at, leaf in enumerate(leaves):
                dim = 1 if at == index else self.slicing.dim(fqn, at, leaf, length)
                if dim is not None and (is_first or at != index):
                    leaves[at] = keep_slice(leaf, dim, self.slices, self._ranks)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            output = attend(*args, **kwargs)
            return self._returned(output, fqn, is_last=is_last)

        return run

    def _stays_sliced(self, stack: str | None) -> bool:
        """Whether what leaves a stack is not gathered here.

        A checkpoint takes plain tensors, and what runs in backward returns what forward did.
        """
        is_alike = torch.is_grad_enabled() == self._begins_with_grad and not is_in_backward()
        return is_alike and self.behind.runs_on_slices(stack)

    def _gather_collected(self, fqn: str, _: nn.Module, args: Any, output: Any) -> Any:
        """Gather what was collected in blocks and a module around them returns."""
        if not self._has_closed or output is None:
            return None  # blocks ran on whole sequences, or not at all
        leaves, spec = pytree.tree_flatten(output)
        is_changed = self.slicing.leaving.gather(fqn, leaves, self.slices, self._ranks)
        return pytree.tree_unflatten(leaves, spec) if is_changed else None

    def _slice_no_short_one(self, leaves: Sequence[Any]) -> None:
        """Have this call run whole on every rank if its sequence is too short to be shared.

        Gradients are those of the whole on every rank then, and so is their average.
        """
        index, fewest = _activation(leaves), _FEWEST * self._ranks.size
        if index is None or leaves[index].dim() < _ROWS or leaves[index].shape[1] >= fewest:
            return
        if not self.runs_short_ones:
            raise ShortSequenceError(
                f"context_parallel.size {self._ranks.size} needs sequences of {fewest} positions "
                f"or more, got activations of shape {tuple(leaves[index].shape)}"
            )
        self.slicing = Slicing()

    def _open_stack(self, stack: str, x: Tensor) -> None:
        length, size = x.shape[1], self._ranks.size
        self._attention.slices = SequenceSlices.over(length, size, self._method)
        self._open = stack
        self._state = None if self.slicing.draws else generator_state()

    def _close_stack(self) -> None:
        stack, self._open, self._has_closed = self._open, None, True
        if self._state is not None and generator_state() != self._state:
            raise ValueError(
                f"context_parallel: {stack!r} drew random numbers, which it did not when the "
                "model was compared with one device; set dropout before the model is parallelized"
            )

    def _returned(self, output: Any, fqn: str | None, *, is_last: bool) -> Any:
        """Return what a block returns; the last one, the whole sequence of its activation.

        And whole what else a block returns that computed on a slice, which is named then.
        """
        leaves, spec = pytree.tree_flatten(output)
        index = _activation(leaves)
        if fqn is not None:
            refuse_shut_output(fqn, output, "context_parallel")
            found = self.slices, self._ranks
            self.slicing.leaving.gather(fqn, leaves, *found, activation=index)
        stack = self._open
        if is_last:
            self._close_stack()
        if index is not None and is_last and not self._stays_sliced(stack):
            leaves[index] = gather_slices(leaves[index], 1, self.slices, self._ranks)
        elif index is not None and is_last:
            self.behind.begin(index, leaves[index], self.slices)
        if index is not None and torch.is_grad_enabled():
            leaves[index] = _BackThrough.apply(leaves[index], self, self.slicing, self.slices)
        return pytree.tree_unflatten(leaves, spec)


class _BackThrough(torch.autograd.Function):
    """Nothing in forward; in backward, begins that of a block on the slices of its own call."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, blocks: SlicedBlocks, slicing: Slicing, slices: SequenceSlices
    ) -> Tensor:
        ctx.given = blocks, slicing, slices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        blocks, slicing, slices = ctx.given
        blocks.slicing, blocks._attention.slices = slicing, slices
        return grad, None, None, None


def name_of(stack: Sequence[str]) -> str:
    """Return the name of a stack of blocks."""
    return stack[0].rpartition(".")[0]


def _activation(leaves: Sequence[Any]) -> int | None:
    found = (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    return next(found, None)
