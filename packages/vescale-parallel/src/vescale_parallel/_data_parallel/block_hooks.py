"""When forward and backward come to a block of the model, and leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from vescale_parallel._parameters.asked_in_backward import refusing_parameters
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import backward_pass, is_in_backward, pytree, untraced


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
    """

    def before(_: nn.Module, args: Any) -> None:
        before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if runs_again():
            return None
        leaves: list[Any] = pytree.tree_leaves(output)
        differentiable = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
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

    # A block that the user compiles is compiled with its hooks around it.
    module.register_forward_pre_hook(untraced(before), prepend=True)
    # Also when forward raises: the model must not be left with freed parameters.
    module.register_forward_hook(untraced(after), always_call=True)
