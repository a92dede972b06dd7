"""Modules for the tests of this folder."""

from typing import Any

from torch import Tensor, nn


def holder(**tensors: Tensor) -> Any:
    """Return a module with parameters, and buffers where tensors are of integers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module
