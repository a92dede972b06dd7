"""Foreach operators: a pointwise operator on every position of some lists.

Positions need not share a layout, or even a mesh. What is written stays where it is; the other
tensors of its position move there. The fused steps of optimizers are such operators, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, replicated, without_partial
from vescale_dtensor._sharding.local_plan import (
    LocalCall,
    Plan,
    count_writes,
    distributed,
    plain_local,
)
from vescale_dtensor._sharding.op_call import OpCall, written_names
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, redistributed, wrap
from vescale_dtensor._tensor.pending_sums import moved
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

aten = torch.ops.aten

_FUSED_STEPS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@cache
def is_foreach(func: OpOverload) -> bool:
    """Whether ``func`` does something pointwise to every position of lists."""
    if func.name().removeprefix("aten::").partition(".")[0] in _FUSED_STEPS:
        return True
    prefix, _, name = func.name().partition("_foreach_")
    if prefix != "aten::":
        return False
    name = name.partition(".")[0].rstrip("_")
    if name in ("norm", "max", "powsum"):
        return False
    packet = getattr(aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return name in ("copy", "zero") or any(torch.Tag.pointwise in o.tags for o in overloads)


def plan_foreach(call: OpCall) -> Plan:
    """Return the plan of a foreach operator."""
    lists = [arg for arg in call.args if _is_tensor_list(arg)]
    func, written = call.func, _written_lists(call)
    writes = bool(written_names(func))
    targets: list[Layout | None] = []
    for position in zip(*lists, strict=True):
        target = _target(position, call, writes)
        if target is None and any(isinstance(t, DISTRIBUTED) for t in position):
            return gathered
        if any(
            is_written and not _lies_at(t, target)
            for t, is_written in zip(position, written, strict=True)
        ):
            return gathered  # a copy would be written
        targets.append(target)

    def finish(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        if writes:
            return count_writes(func, args, kwargs)
        if result is None:
            return None
        return [
            part if target is None else wrap(part, target.typed(part.dtype))
            for part, target in zip(result, targets, strict=True)
        ]

    if _is_laid_out(call, lists, targets):
        return LocalCall(call.func, finish, None)

    def run(_: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = OpCall(func, args, kwargs)
        local_args = [_localized(arg, targets, again) for arg in args]
        local_kwargs = {name: _localized(value, targets, again) for name, value in kwargs.items()}
        return finish(args, kwargs, func(*local_args, **local_kwargs))

    return run


def _written_lists(call: OpCall) -> list[bool]:
    """Return which of the lists of tensors are written."""
    names = {*written_names(call.func)} - {"state_steps"}  # which kernels read, whatever they say
    arguments = zip(call.func._schema.arguments, call.args, strict=False)
    return [argument.name in names for argument, arg in arguments if _is_tensor_list(arg)]


def _lies_at(tensor: Tensor, target: Layout | None) -> bool:
    if target is None:
        return not isinstance(tensor, DISTRIBUTED)
    return isinstance(tensor, DISTRIBUTED) and layout_of(tensor) is target


def _is_laid_out(call: OpCall, lists: list[Any], targets: list[Layout | None]) -> bool:
    """Whether local tensors can take all places: in lists, and scalars whole everywhere."""
    listed = [
        type(tensor) is DTensor and layout_of(tensor) is target
        for each in lists
        for tensor, target in zip(each, targets, strict=True)
    ]
    others = [
        type(arg) is DTensor and layout_of(arg).is_replicated
        for arg in (*call.args, *call.kwargs.values())
        if isinstance(arg, Tensor)
    ]
    return all(listed) and all(others) and len(listed) + len(others) == len(call.tensors)


def _target(position: tuple[Any, ...], call: OpCall, writes: bool) -> Layout | None:
    """Return where the tensors of one position meet, None if nowhere or if all are plain."""
    layouts = [layout_of(t) for t in position if isinstance(t, DISTRIBUTED)]
    if not layouts:
        return None
    if writes:
        if not isinstance(position[0], DISTRIBUTED):
            return None
        target = layouts[0]
        if target.is_partial:
            return None
    else:
        target = layouts[0].placed(without_partial(layouts[0].placements))
    for tensor in position:
        if tensor.ndim and tuple(tensor.shape) != tuple(target.shape):
            return None
    return target if all(made.mesh == target.mesh for made in layouts) else None


def _localized(arg: Any, targets: list[Layout | None], call: OpCall) -> Any:
    if _is_tensor_list(arg):
        return [_local(t, target, call) for t, target in zip(arg, targets, strict=True)]
    if isinstance(arg, DISTRIBUTED):
        return redistributed(distributed(arg, call), replicated(arg.device_mesh))._local_tensor
    return arg


def _local(tensor: Tensor, target: Layout | None, call: OpCall) -> Tensor:
    if target is None:
        return tensor
    laid_out = tuple(tensor.shape) == tuple(target.shape)
    placements = target.placements if laid_out else replicated(target.mesh)
    if type(tensor) is DTensor:
        return moved(tensor, layout_of(tensor).placed(placements))._local_tensor
    if isinstance(tensor, DISTRIBUTED):
        return redistributed(distributed(tensor, call), placements)._local_tensor
    return redistributed(plain_local(tensor, target.mesh), placements)._local_tensor


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], Tensor)
