"""Distribute the parameters and buffers of a module."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._torch_private import DISTRIBUTED, default_mesh

from .distribute_tensor import distribute_tensor


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Replace the parameters and buffers of ``module``, in place, by distributed ones.

    Args:
        module: The module; its values must be equal on every rank.
        device_mesh: The mesh; that of an enclosing ``with mesh:`` if not given.
        partition_fn: Called with name, submodule and mesh; replaces the submodule's own
            parameters as it sees fit. What it leaves becomes ``Replicate``. A parameter that
            several modules share is to be replaced in all of them by the same object.
        input_fn: Called before forward with the module, its positional arguments and the mesh;
            returns other arguments. One of two parameters is called without the module, with a
            warning, as torch does.
        output_fn: The same, after forward and with the module's result.

    Returns:
        ``module``.
    """
    mesh = device_mesh or default_mesh()
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    _replicate_rest(module, mesh)
    if input_fn is not None:
        before = _of_three(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if output_fn is not None:
        after = _of_three(output_fn, "output_fn")
        module.register_forward_hook(lambda mod, _, outputs: after(mod, outputs, mesh))
    return module


def _of_three(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` as one of module, values and mesh."""
    signature = inspect.signature(function)
    with contextlib.suppress(TypeError):
        signature.bind(None, None, None)
        return function
    with contextlib.suppress(TypeError):
        signature.bind(None, None)
        warnings.warn(
            f"{name} of two arguments is deprecated: let it take the module, values and the mesh",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _, values, mesh: function(values, mesh)
    raise ValueError(f"expected {name} of a module, values and a mesh, got {name}{signature}")


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    known: dict[Tensor, Tensor] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, DISTRIBUTED):
                if parameter not in known:
                    made = distribute_tensor(parameter.detach(), mesh)
                    known[parameter] = nn.Parameter(made, parameter.requires_grad)
                submodule.register_parameter(name, known[parameter])  # pyright: ignore[reportArgumentType]: a Parameter
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not isinstance(buffer, DISTRIBUTED):
                if buffer not in known:
                    known[buffer] = distribute_tensor(buffer, mesh)
                submodule._buffers[name] = known[buffer]
