"""Copies of modules that are made to be run once, apart from the model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import CellType, FunctionType

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
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, FunctionType) and value.__closure__:
                vars(each)[name] = _rebound(value, memo)
    return copied


def _rebound(function: FunctionType, memo: Mapping[int, object]) -> FunctionType:
    """Return a function with what it closes over replaced by its copies.

    ``copy.deepcopy`` keeps functions as they are, so that ``self.f = lambda x: layer(x)`` of the
    copy would call the layer of the original.
    """
    cells: list[CellType] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(CellType(memo.get(id(cell.cell_contents), cell.cell_contents)))
        except ValueError:  # nothing was assigned yet
            cells.append(cell)
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        tuple(cells),
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made
