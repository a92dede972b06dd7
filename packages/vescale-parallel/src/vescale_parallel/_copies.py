"""Copies of modules that are made to be run once, apart from the model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

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
    return copy.deepcopy(module, memo)
