"""Unscaling of gradients, as ``torch.amp.GradScaler`` does it.

It asks whether any element of any gradient is infinite or nan. Every rank looks at its parts, and
what one finds all know: otherwise some would skip a step that others take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._comm.collectives import all_reduce
from vescale_dtensor._comm.emulation import part_of
from vescale_dtensor._sharding.local_plan import Plan, count_writes
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._tensor.dtensor import DTensor, layout_of
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

aten = torch.ops.aten


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiply gradients in place; write 1 to ``found_inf`` if any of them is not finite.

    Every rank of their meshes must call this.
    """
    grads, found_inf, inv_scale = args
    others = isinstance(found_inf, DISTRIBUTED) or isinstance(inv_scale, DISTRIBUTED)
    if others or not all(_is_local(grad) for grad in grads):
        return gathered(func, args, kwargs)
    locals_: list[Tensor] = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
    found = locals_[0].new_zeros(found_inf.shape, dtype=found_inf.dtype)
    func([local for local in locals_ if local.numel()], found, inv_scale)
    count_writes(func, args, kwargs)
    for mesh in OpCall(func, args, kwargs).meshes:
        found = all_reduce(found, mesh, op="max")
    found_inf.masked_fill_(part_of(0, found) != 0, 1)


def _is_local(grad: Tensor) -> bool:
    """Whether the elements of a gradient are those of ranks' parts."""
    if not isinstance(grad, DISTRIBUTED):
        return True
    return type(grad) is DTensor and not layout_of(grad).is_partial


HANDLERS: dict[OpOverload, Plan] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale
}
