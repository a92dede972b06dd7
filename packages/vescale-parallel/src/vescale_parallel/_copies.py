"""Copies of modules that are made to be run once, apart from the model."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied_without_hooks(
    module: nn.Module,
    make_parameter: Callable[[nn.Parameter], nn.Parameter],
    make_buffer: Callable[[Tensor], Tensor],
) -> nn.Module:
    """Copy a module with other parameters and buffers, and without its users' hooks.

    Neither the tensors nor what hooks refer to is copied.

    Args:
        module: The module to copy.
        make_parameter: Returns what a parameter becomes; tied ones are asked for once.
        make_buffer: Returns what a buffer becomes.
    """
    memo: dict[int, object] = {id(p): make_parameter(p) for p in module.parameters()}
    memo |= {id(buffer): make_buffer(buffer) for buffer in module.buffers()}
    for each in module.modules():
        memo |= {id(vars(each)[name]): OrderedDict() for name in _HOOKS if name in vars(each)}
    return deep_copied(module, memo)


def deep_copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module as copy.deepcopy does, its functions included.

    copy.deepcopy shares functions. One that is kept on a module and reads it from its closure, as
    ``self.head = lambda x: x @ self.embed.weight.T`` does, would go on reading the original.

    Args:
        module: The module to copy.
        memo: As for copy.deepcopy.
    """
    memo = {} if memo is None else memo
    copied: nn.Module = copy.deepcopy(module, memo)
    for each in copied.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, types.FunctionType):
                vars(each)[name] = _rebound(value, memo)
            elif isinstance(value, list | tuple) and any(map(_is_function, value)):
                values = [_rebound(v, memo) if _is_function(v) else v for v in value]
                vars(each)[name] = type(value)(values)
    return copied


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function whose closure has the copies of what was copied."""
    closure = cast("tuple[types.CellType, ...]", function.__closure__ or ())
    held = [cell.cell_contents for cell in closure if _is_filled(cell)]
    if not any(id(each) in memo for each in held):
        return function
    cells = [
        types.CellType(memo.get(id(cell.cell_contents), cell.cell_contents))
        if _is_filled(cell)
        else cell
        for cell in closure
    ]
    bound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        tuple(cells),
    )  # fmt: skip
    bound.__kwdefaults__ = function.__kwdefaults__
    vars(bound).update(vars(function))
    return bound


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
