"""What does a random operator draw, and where does it leave its generator? Without drawing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_deferred._evaluation.replay import values
from vescale_deferred._tape.deferred_tensor import DeferredTensor
from vescale_deferred._tape.op_schema import op_schema
from vescale_deferred._tape.tape import OpCall
from vescale_deferred._torch_private import tree_map
from vescale_dtensor.random import Draws, PhiloxDraws, Point, Window, cuda_kernels, draws, fill_of

from .generators import Generators


def draw_on_cpu(
    call: OpCall, window: Window, generators: Generators
) -> tuple[Point, Draws | None]:
    """Move the generator as ``call`` does; return where it was, and what it draws if known.

    ``window`` is what it writes or returns.
    """
    generator = call.kwargs.get("generator") or torch.default_generator
    point = generators.point(generator)
    fill = fill_of(call.func, call.args)
    found = None if fill is None else draws(fill, window, point)
    if found is not None:
        generators.move(generator, found[1])
        return point, found[0]
    # What it draws can only be learned by drawing.
    op = op_schema(call.func)
    # What it overwrites needs no values, only memory to draw into.
    target = id(call.args[0]) if op.mutated and op.overwrites else None

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, DeferredTensor):
            return leaf
        if id(leaf) == target:
            return torch.empty_strided(window.shape, window.stride, dtype=window.dtype)
        return values(leaf)

    with generators.drawing(generator):
        args, kwargs = tree_map(real, (call.args, call.kwargs))
        call.func(*args, **kwargs)
    return point, None


def draw_on_cuda(
    call: OpCall, outputs: Any, device: torch.device, generators: Generators
) -> PhiloxDraws | None:
    """Move the generator as ``call`` does; None, and it has not moved, if parts cannot be drawn.

    ``outputs`` are on the meta device; ``device`` is of any type but the CPU.
    """
    kernels = cuda_kernels(device)
    if kernels is None:
        return None
    generator = call.kwargs.get("generator") or kernels.default_generator()
    generators.watch_cuda(generator, kernels)
    fill = fill_of(call.func, call.args)
    if fill is None or not isinstance(outputs, Tensor):
        return None
    return generators.draw_on_cuda(fill, Window.of(outputs), generator, kernels)
