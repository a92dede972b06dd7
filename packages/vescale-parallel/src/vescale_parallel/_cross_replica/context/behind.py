"""What runs behind the last stack of blocks, on this rank's slice: norms, heads and losses.

[Note: behind the blocks] What the last block returns becomes a sliced tensor, see
:mod:`.sliced.tensor`, by a hook behind all others. Modules behind the blocks that were seen to
return one tensor of the positions that they were given get this rank's slice and return it, with
their own code and hooks on plain tensors; as of blocks, that this is what one device computes is
seen where the model is compared with it. Other modules with parameters get the whole. Code between
modules, and modules that are no more than code, as those of losses, compute by the rules of sliced
tensors.

A call returns plain tensors. Where it is differentiated by a loss that it returns, tensors that
are larger than what left the blocks, logits above all, are not gathered: that would be the memory
that slices save, and reading them on one rank alone would wait for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._loss.not_returned import NotReturned
from vescale_parallel._loss.output import is_loss
from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._model.structures import flattened
from vescale_parallel._torch_private import pytree

from .sliced.rules import computed
from .sliced.tensor import WHOLE, Along, Call, SlicedTensor, gathered
from .slices import ContextRanks, SequenceSlices


@dataclass(frozen=True)
class Behind:
    """What runs on slices behind the last stack, in calls of one form.

    Attributes:
        stack: The one whose activation stays sliced; None if all are gathered.
        block: Its last block.
        modules: By FQN, whether a module gets a slice, or the whole.
    """

    stack: str | None = None
    block: str = ""
    modules: Mapping[str, bool] = field(default_factory=dict[str, bool])


class BehindBlocks:
    """Carries out what runs behind the blocks of a model, on one rank.

    Attributes:
        returns_all: Whether a call returns every tensor whole.
        gathered_large: Whether code gathered a tensor larger than what left the blocks.
    """

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks = ranks
        self._now = Behind()
        self._hooked = set[str]()
        self._left: tuple[int, Along] | None = None
        self._calls = list[Call]()
        self.returns_all, self.gathered_large = True, False
        self._asks_for_whole: Callable[[], bool] = lambda: False
        self._last: str | None = None

    def slice_as(self, model: nn.Module, behind: Behind) -> None:
        """Compute the next calls so, in place."""
        self._now, self._left = behind, None
        for call in self._calls:
            call.is_over = True  # it raised
        self._calls.clear()
        if behind.stack is None:
            return
        if behind.block not in self._hooked:
            self._hooked.add(behind.block)
            model.get_submodule(behind.block).register_forward_hook(self._wrap)
        for fqn in behind.modules:
            if fqn in self._hooked:
                continue
            self._hooked.add(fqn)
            module, given = model.get_submodule(fqn), list[tuple[Along, torch.Size] | None]()
            before = functools.partial(self._before, fqn, given)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(functools.partial(self._after, fqn, given))

    def finish_calls(
        self,
        model: nn.Module,
        is_whole_now: Callable[[], bool] = lambda: False,
        last: str | None = None,
    ) -> None:
        """Have calls of a model return plain tensors, by a hook before those that are there.

        ``last`` is the last block of a pipeline, whose stages send whole tensors between stacks.
        """
        self._asks_for_whole, self._last = is_whole_now, last
        model.register_forward_hook(self._returned, prepend=True)

    def is_whole_now(self) -> bool:
        """Whether code of the call that runs has to have whole tensors."""
        return self._asks_for_whole() or self.ends_before(self._last)

    def runs_on_slices(self, stack: str | None) -> bool:
        """Whether what leaves a stack stays sliced now."""
        return stack is not None and stack == self._now.stack and not self.is_whole_now()

    def ends_before(self, block: str | None) -> bool:
        """Whether another block is the last one of a pipeline, whose stages send whole tensors."""
        return block is not None and block != self._now.block

    def begin(self, index: int, x: Tensor, slices: SequenceSlices) -> None:
        """Have what the last block returns at a place be a sliced tensor, behind its hooks."""
        limit = x.shape[0] * slices.length * (x.numel() // max(1, x.shape[0] * x.shape[1]))
        call = Call(limit, self._note_large)
        self._calls.append(call)
        self._left = index, Along(1, 1, slices, self._ranks, call, computed)

    def _note_large(self) -> None:
        self.gathered_large = True

    def _wrap(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._left is None:
            return None
        (index, along), self._left = self._left, None
        leaves, spec = flattened(output)
        leaves[index] = SlicedTensor.of(leaves[index], along)
        return pytree.tree_unflatten(leaves, spec)

    def _before(self, fqn: str, given: list[Any], _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a module this rank's slice, or the whole."""
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SlicedTensor)]
        if not found:
            given.append(None)
            return None
        if not self._now.modules.get(fqn, False) or not found[0].is_row_wise:
            given.append(None)
            return gathered((args, kwargs))
        given.append((found[0].along, found[0].local.shape))
        return pytree.tree_map_only(SlicedTensor, lambda x: x.local, (args, kwargs))

    def _after(self, fqn: str, given: list[Any], _: nn.Module, args: Any, output: Any) -> Any:
        if (found := given.pop()) is None:
            return None
        along, shape = found
        if not isinstance(output, Tensor) or output.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"context_parallel: expected {fqn!r} to return one tensor of the positions that "
                f"it is given, {tuple(shape[:-1])}, as when the model was compared with one "
                f"device, got {getattr(output, 'shape', type(output).__name__)}; {WHOLE}"
            )
        return SlicedTensor.of(output, along)

    def _returned(self, _: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = flattened(output)
        if any(isinstance(x, SlicedTensor) for x in leaves):
            self._make_plain(leaves, output)
            output = pytree.tree_unflatten(leaves, spec)
        calls, self._calls = self._calls, []
        for call in calls:
            call.end()
        return output

    def _make_plain(self, leaves: list[Any], output: Any) -> None:
        is_differentiated = any(is_loss(x) and x.requires_grad for x in leaves)
        drops = is_differentiated and torch.is_grad_enabled() and not self.returns_all
        held, names = self.gathered_large, leaf_names(output)
        for at, x in enumerate(leaves):
            if isinstance(x, SlicedTensor):
                is_large = (
                    torch.Size(x.along.whole_shape(x.local.shape)).numel() > x.along.call.limit
                )
                dropped = drops and is_large
                leaves[at] = NotReturned(names[at], "in slices") if dropped else gathered(x)
        self.gathered_large = held  # by the caller, not by code


class WatchBehind:
    """Notes which modules are called behind the last stack, and what they return."""

    def __init__(self) -> None:
        self._stack, self._block, self._length = "", "", 0
        self._found = dict[str, bool]()
        self._open: str | None = None
        self._has_drawn = False

    def end_stack(self, stack: str, block: str, output: Any) -> None:
        """Note the end of a stack; what was called behind others was before it."""
        found = (x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.ndim > 1)
        first = next(found, None)
        self._length = 0 if first is None else first.shape[1]
        self._stack, self._block, self._found, self._open = stack, block, {}, None

    def note_draw(self) -> None:
        """Note random numbers."""
        self._has_drawn = True

    @property
    def length_now(self) -> int:
        """How many positions there are, while a module runs there; else 0."""
        return 0 if self._open is None else self._length

    def begin(self, fqn: str) -> None:
        """Note that a module begins, outside of the stacks."""
        if self._length and self._open is None:
            self._open, self._has_drawn = fqn, False

    def end(self, fqn: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what a module returned that no other one called here."""
        if fqn != self._open:
            return
        self._open = None
        is_code = not any(True for _ in module.parameters()) and not self._has_drawn
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_wise = (
            is_token_wise(args, kwargs, output)
            and given[0].shape[:-1].numel() % self._length == 0
            and not self._has_drawn
        )
        if is_wise or not is_code:
            self._found[fqn] = is_wise and self._found.get(fqn, True)

    def behind(self, steered: Collection[str]) -> Behind:
        """Return what may run on slices, but for modules that compare the length."""
        found = {
            fqn: is_wise and not any(f"{each}.".startswith(f"{fqn}.") for each in steered)
            for fqn, is_wise in self._found.items()
        }
        return Behind(self._stack or None, self._block, found)


def is_token_wise(args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module returned one tensor of the positions of the one that it was given."""
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return (
        len(given) == 1
        and isinstance(output, Tensor)
        and given[0].ndim > 1
        and output.shape[:-1] == given[0].shape[:-1]
    )
