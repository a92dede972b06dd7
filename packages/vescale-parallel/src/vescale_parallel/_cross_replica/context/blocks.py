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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import name_of
from vescale_parallel._model.inputs import refuse_shut_output
from vescale_parallel._model.structures import flattened
from vescale_parallel._torch_private import is_in_backward, pytree
from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.generators import generator_state
from vescale_parallel._trace.memory_order import Order

from .attention.cross import AttendsAcross
from .attention.heads import HeadsAttention
from .attention.intercept import Interception
from .attention.of_sliced import AttendsSliced
from .attention.ring_attention import RingAttention
from .behind import BehindBlocks
from .conversions import calling_back, gather_slices, keep_slice
from .draws import DrawsSlices, SlicedDraw
from .leaving import around_one_stack
from .shown import ShownModules
from .slices import ContextRanks, Method, Range, SequenceSlices
from .slicing import (
    LEAVE_OUT,
    Slicing,
    activation_of,
    check_returned,
    given_activation,
    is_too_short,
    needs_gradient,
)
from .written import Combination, Place, WholeWrites

Around = Callable[[], AbstractContextManager[None]]
# Given a stack, and how long a slice is: which part of it blocks hand on on this rank.
Between = Callable[[str, int], Range]


class SlicedBlocks:
    """The stacks of blocks of a model whose sequences ranks share.

    Attributes:
        slicing: What the call that runs slices.
        stacks: Names of those that may compute on slices.
        behind: What computes on slices behind them.
        slices_of: Of the sequence of each stack that ran.
        is_compared: Whether this run is compared with one device.
        running: The stack of which a block ran last, perhaps again in backward.
        between: Which positions of a slice this rank has between the blocks of a stack.
    """

    def __init__(
        self,
        ranks: ContextRanks,
        method: Method = "all_to_all",
        *,
        compiled: bool = False,
        between: Between | None = None,
    ) -> None:
        self._ranks = ranks
        self.behind = BehindBlocks(ranks)
        self._writes = WholeWrites(ranks)
        this = weakref.proxy(self)  # a cycle would keep copies that were compared
        self._shown = ShownModules(
            ranks,
            lambda: (this.slicing.shown, this.slices),
            lambda n: this.between(this.running, n),
        )
        self._method: Method = method
        self._compiled = compiled
        self.between: Between = between or (lambda _, length: (0, length))
        self._attention = RingAttention(ranks) if method == "ring" else HeadsAttention(ranks)
        across = AttendsAcross(self._attention, ranks.rank, lambda num: this._is_across(num))
        self._interception = Interception(AttendsSliced(across), compiled=compiled)
        self.slicing = Slicing()
        self.stacks: tuple[str, ...] = ()
        self.slices_of: dict[str, SequenceSlices] = {}
        self.is_compared = False
        self._open: str | None = None
        self.running = ""
        self._num_opened = 0
        self._closed: str | None = None  # the stack that ran last in this call
        self._begins_with_grad = True
        # Of blocks that are not the first ones, with which a stage of a pipeline may begin.
        self._within: dict[str, str] = {}
        self._state: object = None
        self._intercepted: set[str] = set()
        self._blocks, self._compilable = set[str](), set[str]()

    @property
    def slices(self) -> SequenceSlices:
        """Of the sequence that runs, or ran last."""
        return self._attention.slices

    def install(
        self,
        model: nn.Module,
        stacks: Sequence[Sequence[str]],
        units: frozenset[str] = frozenset(),
    ) -> None:
        """Have the blocks of all stacks compute on slices, as :meth:`slice_as` says.

        ``units`` are modules that may run again in backward, some of them within a block.
        """
        self._model, self.stacks = model, tuple(map(name_of, stacks))
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for stack in stacks:
            for fqn in stack:
                block, ends = model.get_submodule(fqn), (fqn == stack[0], fqn == stack[-1])
                block.forward = self._wrapped(block.forward, name_of(stack), fqn, *ends)
                self._intercepted.add(fqn)
                self._blocks.add(fqn)
            self._within.update(dict.fromkeys(stack[1:], name_of(stack)))
        for fqn in units:
            self._intercept(fqn)
        self._shown.wrap(model, units)
        self._compilable = self._blocks | units
        for fqn in around_one_stack(model, stacks):
            hook = functools.partial(self._gather_collected, fqn)
            model.get_submodule(fqn).register_forward_hook(hook, prepend=True)

    def enter(self, fqn: str, leaves: Sequence[Any]) -> None:
        """Begin a pass within a stack: a stage of a pipeline that is sent its slice.

        ``leaves`` are of what the block is called with, of whole sequences still.
        """
        stack, index = self._within.get(fqn), activation_of(leaves)
        if stack is None or index is None or stack not in self.slicing.stacks:
            return
        self._slice_no_short_one(leaves)
        if self.slicing.stacks:
            self._open_stack(stack, leaves[index])

    def slice_as(self, slicing: Slicing) -> None:
        """Compute the next calls so; see [Note: attention that runs again]."""
        self.slicing = slicing
        for fqn in sorted(slicing.attending | slicing.shown.modules):
            self._intercept(fqn)
        if self._compiled and (found := sorted(slicing.shown.modules & self._compilable)):
            raise ValueError(
                f"context_parallel: the code of {found[0]!r} itself, which is compiled, makes "
                "masks of the length that it sees, or multiplies positions with positions; have a "
                "module of its own do so, or leave compile out of the plan"
            )
        self._shown.show(self._model, slicing.shown, besides=self._blocks)
        self._writes.watch(self._model, slicing.written, self._written_now)
        self.behind.slice_as(self._model, slicing.behind)

    def _intercept(self, fqn: str) -> None:
        if fqn not in self._intercepted:
            module, is_now = (
                self._model.get_submodule(fqn),
                functools.partial(self._attends_by, fqn),
            )
            module.forward = self._interception.of_module(module.forward, is_now, fqn)
            self._intercepted.add(fqn)

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
        self, fqn: str, index: int, shape: tuple[int, ...], order: Order, part: int | None
    ) -> SlicedDraw | None:
        """Return what of one device's numbers a rank's are; None if it draws alike, or whole.

        ``part`` is the dim that tensor-parallel ranks have parts of, if any.

        Raises:
            ValueError: If they are not drawn as when the model was compared with one device.
        """
        of_slice = part if self._attention.is_along_sequence else None
        extent_of = functools.partial(self._extent, of_slice)
        given = (fqn, index, len(shape)), shape, order, extent_of
        found = self.slicing.drawn_now(*given, in_blocks=self._open is not None)
        return None if found is None else SlicedDraw(*found, of_slice in found[0])

    def _extent(self, of_slice: int | None, dim: int) -> Extent:
        """Return what this rank has of a dim: of one of its slice, what is between blocks."""
        extent = self._attention.extent()
        if dim != of_slice:
            return extent
        return extent.within(*self.between(self.running, extent.here))

    def _attends_by(self, fqn: str) -> bool:
        return fqn in self.slicing.attending or fqn in self.slicing.shown.modules

    def _begin_backward(self, slicing: Slicing, slices: SequenceSlices) -> None:
        """Have backward of a block be on the slices of its own call."""
        self.slicing, self._attention.slices = slicing, slices

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
        self._open, self._closed, self._num_opened = None, None, 0
        self._begins_with_grad = torch.is_grad_enabled()

    def _end(self, _: nn.Module, args: Any, output: Any) -> None:
        stack, self._open, self._closed = self._open, None, None
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
                self._slice_no_short_one(flattened((args, kwargs))[0])
            if stack not in self.slicing.stacks:
                return self._returned(forward(*args, **kwargs), None, stack, is_last=False)
            self.running = stack
            leaves, spec = flattened((args, kwargs))
            index = given_activation(fqn, leaves)
            if is_first:
                self._open_stack(stack, leaves[index])
            length, own = self.slices.length, self.slices.sizes[self._ranks.rank]
            first, end = (0, own) if is_first else self.between(stack, own)
            if leaves[index].shape[1] != end - first and not is_first:
                raise ValueError(
                    f"context_parallel: {fqn!r} got {leaves[index].shape[1]} positions, not this "
                    f"rank's {own} of {length}; blocks of {stack!r} have to be called in order"
                )
            for at, leaf in enumerate(leaves):
                dim = 1 if at == index else self._dim(fqn, at, leaf)
                if dim is not None and (is_first or at != index):
                    leaves[at] = keep_slice(leaf, dim, self.slices, self._ranks)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            output = self._shown.call(fqn, attend, args, kwargs)
            return self._returned(output, fqn, stack, is_last=is_last)

        return run

    def _dim(self, fqn: str, place: int, x: Any) -> int | None:
        given = fqn, place, x, self.slices.length, self._num_opened > 1 and needs_gradient(x)
        return self.slicing.dim(*given, is_compared=self.is_compared)

    def _is_across(self, num_keys: int) -> bool:
        """Whether the module that attends now does so to what an encoder returned."""
        found, fqn = self.slicing, self._interception.attending
        is_other = self._num_opened > 1 and num_keys != self.slices.sizes[self._ranks.rank]
        return found.across.setdefault(fqn, fqn in found.unequal or is_other)

    def _has_parts(self, stack: str | None) -> bool:
        """Whether ranks have parts of the gradient of what leaves a stack, which others read."""
        return stack != self.slicing.last

    def _stays_sliced(self, stack: str | None) -> bool:
        """Whether what leaves a stack is not gathered here.

        A checkpoint takes plain tensors, and what runs in backward returns what forward did.
        """
        is_alike = torch.is_grad_enabled() == self._begins_with_grad and not is_in_backward()
        return is_alike and self.behind.runs_on_slices(stack)

    def _gather_collected(self, fqn: str, _: nn.Module, args: Any, output: Any) -> Any:
        """Gather what was collected in blocks and a module around them returns."""
        if self._closed is None or output is None:
            return None  # blocks ran on whole sequences, or not at all
        leaves, spec = flattened(output)
        last = self.slicing.last
        sums = last is None or not f"{last}.".startswith(f"{fqn}." if fqn else "")
        found, own = (self.slices, self._ranks), self.slices.sizes[self._ranks.rank]
        first, end = self.between(self._closed, own)
        kept = end - first if end - first != own else None
        is_changed = self.slicing.leaving.gather(fqn, leaves, *found, sums=sums, kept=kept)
        return pytree.tree_unflatten(leaves, spec) if is_changed else None

    def _slice_no_short_one(self, leaves: Sequence[Any]) -> None:
        """Have this call run whole on every rank if its sequence is too short to be shared.

        Gradients are those of the whole on every rank then, and so is their average.
        """
        if is_too_short(leaves, self._ranks.size, is_compared=self.is_compared):
            self.slicing = Slicing()

    def _open_stack(self, stack: str, x: Tensor) -> None:
        if stack == self.slicing.last and self._closed == stack:
            raise ValueError(
                f"context_parallel: {stack!r} runs again in a call of the model, in which it ran "
                "once when that was compared with one device; give calls that run it as often as "
                f"that an argument of another kind, or {LEAVE_OUT}"
            )
        length, size = x.shape[1], self._ranks.size
        self._attention.slices = SequenceSlices.over(length, size, self._method)
        self.slices_of[stack] = self._attention.slices
        self._open = stack
        self._num_opened += 1
        self._state = None if self.slicing.draws else generator_state()

    def _close_stack(self) -> None:
        stack, self._open, self._closed = self._open, None, self._open
        if self._state is not None and generator_state() != self._state:
            raise ValueError(
                f"context_parallel: {stack!r} drew random numbers, which it did not when the "
                "model was compared with one device; set dropout before the model is parallelized"
            )

    def _returned(self, output: Any, fqn: str | None, stack: str, *, is_last: bool) -> Any:
        """Return what a block returns; the last one, the whole sequence of its activation.

        And whole what else a block returns that computed on a slice, which is named then.
        """
        leaves, spec = flattened(output)
        index = self.slicing.activation(stack, leaves)
        if fqn is not None:
            refuse_shut_output(fqn, output, "context_parallel")
            found, sums = (self.slices, self._ranks), self._has_parts(stack)
            self.slicing.leaving.gather(fqn, leaves, *found, activation=index, sums=sums)
        if is_last:
            self._close_stack()
        if index is not None and is_last:
            check_returned(fqn, leaves[index], self.slices, self._ranks.rank)
        if index is not None and is_last and not self._stays_sliced(stack):
            found, sums = (self.slices, self._ranks), self._has_parts(stack)
            leaves[index] = gather_slices(leaves[index], 1, *found, sums=sums)
        elif index is not None and is_last:
            self.behind.begin(index, leaves[index], self.slices)
        if index is not None and torch.is_grad_enabled():
            leaves[index] = calling_back(
                leaves[index], functools.partial(self._begin_backward, self.slicing, self.slices)
            )
        return pytree.tree_unflatten(leaves, spec)
