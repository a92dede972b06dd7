"""When forward and backward come to a block of the model, and leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from vescale_parallel._torch_private import pytree, untraced


class AfterForward(Protocol):
    """Is told that forward has left a block, and whether backward will come to it."""

    def __call__(self, *, has_backward: bool) -> None: ...


def on_block(
    module: nn.Module,
    *,
    before_forward: Callable[[], None],
    runs_again: Callable[[], bool],
    after_forward: AfterForward,
    before_backward: Callable[[], None],
    num_backwards: Callable[[], int],
) -> None:
    """Have functions called as forward and backward reach a block.

    Args:
        module: The block.
        before_forward: Before each run.
        runs_again: Whether it runs within its own backward pass, which is no forward pass.
        after_forward: After each that is one, also when it raises.
        before_backward: Before each backward pass, once.
        num_backwards: Tells backward passes apart.
    """

    def before(_: nn.Module, args: Any) -> None:
        before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if runs_again():
            return
        leaves: list[Any] = pytree.tree_leaves(output)
        differentiable = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        after_forward(has_backward=bool(differentiable))
        entered: set[int] = set()

        def enter_backward(grad: Tensor) -> None:
            if num_backwards() not in entered:
                entered.add(num_backwards())
                before_backward()

        for leaf in differentiable:
            leaf.register_hook(enter_backward)

    # A block that the user compiles is compiled with its hooks around it.
    module.register_forward_pre_hook(untraced(before), prepend=True)
    # Also when forward raises: the model must not be left with freed parameters.
    module.register_forward_hook(untraced(after), always_call=True)
