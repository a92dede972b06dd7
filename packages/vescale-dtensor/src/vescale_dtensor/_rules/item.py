"""Operators that return Python values: those of elements are read from the global tensor."""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._layout.layout import replicated
from vescale_dtensor._sharding.local_plan import Plan, distributed
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._tensor.dtensor import layout_of, redistributed
from vescale_dtensor._torch_private import OpOverload

aten = torch.ops.aten


def value(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value of the whole tensors. Every rank of their meshes must call this."""
    call = OpCall(func, args, kwargs)
    whole = [distributed(tensor, call) for tensor in call.tensors]
    locals_ = [redistributed(t, replicated(layout_of(t).mesh))._local_tensor for t in whole]
    local_args, local_kwargs = call.with_tensors(locals_)
    return func(*local_args, **local_kwargs)


def _is_set_to(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether tensors share their elements, which copies of them would not."""
    call = OpCall(func, args, kwargs)
    first, second = (distributed(tensor, call) for tensor in call.tensors)
    same = layout_of(first) is layout_of(second)
    return same and func(first._local_tensor, second._local_tensor)


def _is_pinned(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this rank's part is in page-locked memory."""
    call = OpCall(func, args, kwargs)
    (tensor,) = (distributed(tensor, call) for tensor in call.tensors)
    return func(tensor._local_tensor, *args[1:], **kwargs)


HANDLERS: dict[OpOverload, Plan] = {
    **dict.fromkeys(
        (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default), value
    ),
    aten.is_set_to.default: _is_set_to,
    aten.is_pinned.default: _is_pinned,
}
