"""When forward and backward come to a block of the model, and leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vescale_parallel._model.copies import tensors_within
from vescale_parallel._parameters.asked_in_backward import refusing_parameters
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import (
    backward_pass,
    is_in_backward,
    is_transformed,
    left_out,
    outside_of_transforms,
    pytree,
)

_WHY = "parameters of the block are gathered and freed"

# Of blocks, what gets them ready to run again in backward.
_READY: MutableMapping[nn.Module, Callable[[], None]] = WeakKeyDictionary()


def ready_to_run_again(module: nn.Module) -> None:
    """Have a block be ready to compute anew what backward needs of it, as recomputation does.

    That is before backward has come to what the block returned, where something else came of what
    it computed: a loss that it put into a list, made of its output.
    """
    _READY.get(module, lambda: None)()


class AfterForward(Protocol):
    """Is told that forward has left a block, and whether backward will come to it."""

    def __call__(self, *, has_backward: bool) -> None: ...


class PartsOfBlocks:
    """Parts of blocks that forward calls while their block does not run.

    The embedding of a first block, of which a model's last layer asks for what it did there (DiT's
    ``self.blocks[0].norm1.emb(timestep)``). Which ones are, the first calls show: a hook on every
    module of every block would cost each call of it a microsecond for good.

    Attributes:
        running: The blocks that run now, outermost first.
    """

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self._blocks: list[BlockHooks] = []
        self._seen = set[bool]()
        self._handles: dict[nn.Module, RemovableHandle] = {}

    def add(self, block: BlockHooks) -> None:
        """Take the hooks of a block, which are told of calls of its parts."""
        self._blocks.append(block)

    def begin_forward(self) -> None:
        """Watch the first call, with gradients and without."""
        self.running.clear()  # of an interrupted call
        if (mode := torch.is_grad_enabled()) in self._seen:
            return
        self._seen.add(mode)
        for block in self._blocks:
            if _is_compiled(block.module):  # it would be again, without the hooks
                continue
            own = {id(param.sharded) for param in block.params}
            for part in [*block.module.modules()][1:]:
                if any(id(parameter) in own for parameter in part.parameters()):
                    self._watch(part, block)

    def _watch(self, part: nn.Module, block: BlockHooks) -> None:
        def before(part: nn.Module, args: Any, kwargs: Any) -> None:
            if block.takes_part(part, args, kwargs):
                self._handles.pop(part).remove()

        handle = part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._handles[part] = handle

    def end_forward(self) -> None:
        """Watch no longer."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _is_compiled(block: nn.Module) -> bool:
    return block._compiled_call_impl is not None or "_vescale_is_compiled" in vars(block)


@dataclass(eq=False)
class BlockHooks:
    """Has functions called as forward and backward reach a block.

    Args:
        module: The block.
        params: Its parameters.
        before_forward: Before each run.
        runs_again: Whether it runs within its own backward pass, which is no forward pass.
        after_forward: After each that is one, also when it raises.
        before_backward: Before each backward pass, once; and again for passes within one if
            it is no longer ready.
        is_ready: Whether it still is.
        num_backwards: Tells backward passes apart.
        frees: Whether backward cannot come to the block without ``before_backward``.
        parts: Which parts of it forward calls while it does not run; they are reached as it is.
    """

    module: nn.Module
    params: Sequence[ShardedParameter]
    before_forward: Callable[[], None]
    runs_again: Callable[[], bool]
    after_forward: AfterForward
    before_backward: Callable[[], None]
    is_ready: Callable[[], bool]
    num_backwards: Callable[[], int]
    frees: bool
    parts: PartsOfBlocks
    # Of calls that run; None of a part within the block.
    _given: list[dict[int, tuple[Tensor, Any]] | None] = field(default_factory=list[Any])

    def install(self) -> None:
        """Add the hooks to the block."""
        _READY[self.module] = self._get_ready
        self._install_on(self.module, self._before)
        if self.frees:
            self.module.register_forward_hook(left_out(_refuse_nothing, _WHY))
        self.parts.add(self)

    def takes_part(self, part: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a call of a part is one without its block, to which hooks are added then.

        Raises:
            ValueError: If it is within another block, and this one is freed.
        """
        if self._given:
            return False
        self._install_on(part, self._before_part)
        self._before_part(part, args, kwargs)
        return True

    def _install_on(self, on: nn.Module, before: Callable[[nn.Module, Any, Any], None]) -> None:
        # A block that the user compiles is compiled with its hooks around it.
        begin, end = left_out(before, _WHY), left_out(self._after, _WHY)
        on.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        # Also when forward raises: the model must not be left with freed parameters.
        on.register_forward_hook(end, always_call=True)

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        self._given.append({id(x): (x, x.grad_fn) for x in leaves if isinstance(x, Tensor)})
        with outside_of_transforms():
            self.before_forward()
        self.parts.running.append(self.module)

    def _before_part(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if self._given:
            self._given.append(None)
            return
        if self.frees and self.parts.running:
            raise ValueError(_within_error(part, self.module, self.parts.running[-1]))
        self._before(part, args, kwargs)

    def _after(self, _: nn.Module, args: Any, output: Any) -> Any:
        if not self._given:  # a hook before this one has raised
            return None
        given = self._given.pop()
        if given is None:
            return None
        if self.parts.running:
            self.parts.running.pop()
        if self.runs_again():
            return None
        if is_transformed():  # backward comes to it by what nobody can tell here
            return self.after_forward(has_backward=True)
        differentiable = [x for x in _differentiable_in(output) if not _is_as_given(x, given)]
        self.after_forward(has_backward=bool(differentiable))
        enter_backward = self._entering_backward()
        for leaf in differentiable:
            leaf.register_hook(enter_backward)
        # A program's own backward may ask for gradients of what it computes there.
        return refusing_parameters(output, self.params) if is_in_backward() else None

    def _entering_backward(self) -> Callable[[Tensor], None]:
        """Return what is called as backward comes to what one call has returned."""
        entered: set[tuple[int, int]] = set()

        def enter_backward(grad: Tensor) -> None:
            now = self.num_backwards(), backward_pass()
            if now in entered:  # also by what the block hands on, of which others come first
                return
            is_first = all(number != now[0] for number, _ in entered)
            entered.add(now)
            if is_first or not self.is_ready():
                self.before_backward()

        return enter_backward

    def _get_ready(self) -> None:
        if is_in_backward() and not self.runs_again():
            self.before_backward()


def _within_error(part: nn.Module, block: nn.Module, other: nn.Module) -> str:
    name = next((f" {fqn!r}" for fqn, each in block.named_modules() if each is part), "")
    return (
        f"the part{name} ({type(part).__name__}) of a block ({type(block).__name__}) is called "
        f"within another block ({type(other).__name__}), which backward comes to in the middle of "
        "that one: data_parallel.zero_stage 3 would free the one for the other. Call it between "
        "blocks, and hand over what it returns, or use data_parallel.zero_stage 2"
    )


def _refuse_nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Refuse a block that returns no tensor, as a hook: backward would come to it unseen.

    Raises:
        TypeError: If it does, and could be differentiated.
    """
    if not torch.is_grad_enabled() or next(tensors_within(output), None) is not None:
        return
    if any(parameter.requires_grad for parameter in module.parameters()):
        raise TypeError(
            f"expected a block ({type(module).__name__}) to return tensors, got "
            f"{type(output).__name__}: with data_parallel.zero_stage 3 its parameters are "
            "gathered when backward comes to what it returns. Return what it has computed, "
            "instead of writing it into its arguments"
        )


def _is_as_given(x: Tensor, given: Mapping[int, tuple[Tensor, Any]]) -> bool:
    """Whether a block returns what it was given, and has not written to it.

    Backward comes to whoever made it then, a block before perhaps, and not to this one, which
    was dropped (stochastic depth), or hands it on.
    """
    return id(x) in given and given[id(x)][1] is x.grad_fn


def _differentiable_in(output: Any) -> list[Tensor]:
    """Return what has a graph of what a block returns, in objects that pytree leaves shut, too.

    An object that holds what other blocks have made, a cache, comes beside what the block made.
    """
    leaves = pytree.tree_leaves(output)
    found = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    shut = [x for x in leaves if not isinstance(x, Tensor) and (is_dataclass(x) or not found)]
    return found + [x for x in tensors_within(shut) if x.grad_fn is not None]
