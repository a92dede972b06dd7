"""One forward of a whole model that is watched: where it attends, and where it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import generator_state

from .blocks import name_of
from .intercept import AttentionMode
from .interface import interface_of


class ForwardWatch:
    """Notes of one forward.

    Attributes:
        attending: Blocks that called attention.
        modules: The innermost modules in them that did.
        drawing: By stack of blocks, where random numbers were first drawn between its beginning
            and its end, where activations are slices: a module, or the block before which it was.
    """

    def __init__(self) -> None:
        self.attending: set[str] = set()
        self.modules: set[str] = set()
        self.drawing: dict[str, str] = {}
        self._block: str | None = None
        self._stack: str | None = None
        self._before: object = None
        self._within: list[str] = []

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a model that is thrown away afterwards."""
        for stack in block_stacks(model):
            for fqn in stack:
                self._follow(model.get_submodule(fqn), fqn, stack)
        for fqn, module in model.named_modules():
            self._follow_within(module, fqn)
        with torch.no_grad(), interface_of(self), AttentionMode(self):
            model(*args, **kwargs)

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Any:
        """Note ``F.scaled_dot_product_attention``, which computes what it does."""
        self._note()
        return F.scaled_dot_product_attention(*args, **kwargs)

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Note a function of transformers' attention interface, likewise."""
        self._note()
        return function(*args, **kwargs)

    def wants(self) -> bool:
        """Whether to be told of attention that is called now."""
        return True

    def _note(self) -> None:
        if self._block is not None:
            self.attending.add(self._block)
            self.modules.add(self._within[-1])

    def _note_draws(self, where: str) -> None:
        if self._stack is not None and generator_state() != self._before:
            self.drawing.setdefault(self._stack, where)

    def _follow(self, block: nn.Module, fqn: str, stack: Sequence[str]) -> None:
        def begin(_: nn.Module, args: Any) -> None:
            if fqn == stack[0]:
                self._stack, self._before = name_of(stack), generator_state()
            self._note_draws(fqn)
            self._block = fqn

        def end(_: nn.Module, args: Any, output: Any) -> None:
            self._note_draws(fqn)
            self._block = None
            if fqn == stack[-1]:
                self._stack = None

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)

    def _follow_within(self, module: nn.Module, fqn: str) -> None:
        def begin(_: nn.Module, args: Any) -> None:
            self._within.append(fqn)

        def end(_: nn.Module, args: Any, output: Any) -> None:
            self._within.pop()
            self._note_draws(fqn)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)


def noted_outputs(module: nn.Module) -> dict[str, Tensor]:
    """Return what will hold the first tensor of the first output of every module, as they end."""
    found: dict[str, Tensor] = {}

    def note(fqn: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(_: nn.Module, args: Any, output: Any) -> None:
            tensors = (x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
            if fqn not in found and (first := next(tensors, None)) is not None:
                found[fqn] = first.detach()

        return after

    for fqn, each in module.named_modules():
        each.register_forward_hook(note(fqn))
    return found
