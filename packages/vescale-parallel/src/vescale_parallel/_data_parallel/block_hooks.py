"""When forward and backward come to a block of the model, and leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

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


def on_block(
    module: nn.Module,
    params: Sequence[ShardedParameter],
    *,
    before_forward: Callable[[], None],
    runs_again: Callable[[], bool],
    after_forward: AfterForward,
    before_backward: Callable[[], None],
    is_ready: Callable[[], bool],
    num_backwards: Callable[[], int],
    frees: bool,
) -> None:
    """Have functions called as forward and backward reach a block.

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
    """
    given: list[dict[int, tuple[Tensor, Any]]] = []  # of calls that run

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        given.append({id(x): (x, x.grad_fn) for x in leaves if isinstance(x, Tensor)})
        with outside_of_transforms():
            before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if not given:  # a hook before this one has raised
            return None
        was_given = given.pop()
        if runs_again():
            return None
        if is_transformed():  # backward comes to it by what nobody can tell here
            return after_forward(has_backward=True)
        differentiable = [x for x in _differentiable_in(output) if not _is_as_given(x, was_given)]
        after_forward(has_backward=bool(differentiable))
        entered: set[tuple[int, int]] = set()

        def enter_backward(grad: Tensor) -> None:
            now = num_backwards(), backward_pass()
            if now in entered:  # also by what the block hands on, of which others come first
                return
            is_first = all(number != now[0] for number, _ in entered)
            entered.add(now)
            if is_first or not is_ready():
                before_backward()

        for leaf in differentiable:
            leaf.register_hook(enter_backward)
        # A program's own backward may ask for gradients of what it computes there.
        return refusing_parameters(output, params) if is_in_backward() else None

    def ready() -> None:
        if is_in_backward() and not runs_again():
            before_backward()

    _READY[module] = ready
    # A block that the user compiles is compiled with its hooks around it.
    module.register_forward_pre_hook(left_out(before, _WHY), prepend=True, with_kwargs=True)
    # Also when forward raises: the model must not be left with freed parameters.
    module.register_forward_hook(left_out(after, _WHY), always_call=True)
    if frees:
        module.register_forward_hook(left_out(_refuse_nothing, _WHY))


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
