"""Random operators: every rank draws its part of what one device draws.

An operator whose numbers belong to elements is drawn in parts, see
:mod:`vescale_dtensor.random`. Any other (``multinomial``, ``randperm``, ``poisson``) is left to
the fallback: every rank draws the whole, which is the same everywhere because generators are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as torch_dtensor
from torch import Generator, Tensor

from vescale_dtensor._comm.emulation import drawing_from, per_rank
from vescale_dtensor._layout.boxes import local_boxes
from vescale_dtensor._layout.layout import Layout, layout, without_partial
from vescale_dtensor._sharding.local_plan import Plan, local_under
from vescale_dtensor._sharding.op_call import is_inplace
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._tensor.dtensor import as_dtensor, layout_of, wrap
from vescale_dtensor._tensor.strides import in_memory_order
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload, pytree
from vescale_dtensor.random import RandomOperator, Window, draw_part, random_operator
from vescale_dtensor.random._random_ops import OPERATORS_ON_TENSORS

aten = torch.ops.aten


# Their result is contiguous whatever the first argument is, and drawn in that order.
_CONTIGUOUS = frozenset({
    aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor,
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor,
})  # fmt: skip


def draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operator on the first argument's layout."""
    first = args[0] if isinstance(args[0], DISTRIBUTED) else None
    how = None
    device: torch.device | None = None
    if first is not None:
        device = torch.device(kwargs.get("device") or first.device)
        if device.type in ("cpu", "cuda"):
            how = random_operator(func, args, device_type=device.type)
    if first is None or device is None or how is None or not _can_be_parted(first, args):
        return gathered(func, args, kwargs)
    _check_parameters(func, args)
    target = layout_of(first).placed(without_partial(layout_of(first).placements))
    if func in _CONTIGUOUS:
        target = layout(target.mesh, target.placements, target.shape, None, target.dtype)
    drawn_layout = target.typed(how.dtype or kwargs.get("dtype") or target.dtype)
    generator: Generator | None = kwargs.get("generator")

    def part(coordinate: tuple[int, ...], local_args: Any) -> Any:
        drawn = _draw(how, drawn_layout, coordinate, generator, device)
        return drawn if how.finish is None else how.finish(drawn, local_args)

    local_args = tuple(_local(arg, target) for arg in args)
    with drawing_from(generator):
        result = per_rank(part, target.mesh, local_args)
    if is_inplace(func):
        as_dtensor(first)._local_tensor.copy_(result)
        return first
    return pytree.tree_map_only(Tensor, lambda x: wrap(x, target.typed(x.dtype)), result)


def _check_parameters(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Refuse what the operator refuses, on all ranks: parts are drawn by another operator."""
    if func in (aten.normal.float_Tensor, aten.normal.Tensor_Tensor):
        std = args[1]
        if not std.dtype.is_complex and not bool((std >= 0).all()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
    elif func in (aten.bernoulli.default, aten.bernoulli.Tensor, aten.bernoulli_.Tensor):
        p = args[-1]
        if not bool(((p >= 0) & (p <= 1)).all()):
            raise RuntimeError("bernoulli expects all elements of p to be in 0..1")


def _can_be_parted(first: torch_dtensor.DTensor, args: tuple[Any, ...]) -> bool:
    """Whether every tensor is laid out, or can be, as the first is."""
    made = layout_of(first)
    return not made.is_partial and all(
        tuple(arg.shape) == tuple(made.shape)
        and (not isinstance(arg, DISTRIBUTED) or layout_of(arg).mesh == made.mesh)
        for arg in args
        if isinstance(arg, Tensor)
    )


def _local(arg: Any, target: Layout) -> Any:
    return local_under(arg, target) if isinstance(arg, Tensor) else arg


def _draw(
    how: RandomOperator,
    made: Layout,
    coordinate: tuple[int, ...],
    generator: Generator | None,
    device: torch.device,
) -> Tensor:
    empty = torch.empty(made.local_shape(coordinate), dtype=made.dtype, device=device)
    out = in_memory_order(empty, made.stride)
    draw_part(
        how.fill,
        window=Window(tuple(made.shape), made.stride, 0, made.dtype),
        boxes=local_boxes(made.shape, made.mesh.shape, coordinate, made.placements),
        out=out,
        generator=generator,
    )
    return out


HANDLERS: dict[OpOverload, Plan] = dict.fromkeys(OPERATORS_ON_TENSORS, draw)
