"""Norms over whole tensors: added up in float64 in rank order, one collective for a whole list.

So the norm that clips gradients does not depend on how they are distributed, beyond float64
rounding, and a model's hundreds of gradients cost one small all-gather per mesh and a handful
of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._comm.primitives import all_gather_rows
from vescale_dtensor._layout.layout import layout, replicated
from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._sharding.local_plan import Plan
from vescale_dtensor._sharding.op_call import OpCall, argument_table
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._tensor.dtensor import layout_of, wrap
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

from .decompositions import settled
from .variance import norm_over_dims

aten = torch.ops.aten

# How many elements torch's CPU kernel, which adds one after the other, gets at a time: rounding
# stays below 1e-14 whatever the size of a tensor, and no tensor is copied to float64 whole.
_PIECE = 1 << 15


def norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the p-norm of each tensor, whole on every rank."""
    names = list(argument_table(func))
    given = dict(zip(names, args, strict=False)) | kwargs
    many = func is aten._foreach_norm.Scalar
    order_given = given.get("ord", given.get("p"))
    order = 2.0 if order_given is None else float(order_given)
    tensors: Sequence[Tensor] = given["self"] if many else [given["self"]]
    if given.get("dim") or given.get("keepdim") or order <= 0 or _any_complex(tensors):
        return gathered(func, args, kwargs) if many else norm_over_dims(func, args, kwargs)
    results = _norms(tensors, order, given.get("dtype"))
    return results if many else results[0]


def _distance(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the norm of a difference, which is rounded as the one that autograd makes of it.

    The gradient of the largest element is looked for where the difference equals the norm.
    """
    call = OpCall(func, args, kwargs)
    difference = aten.sub.Tensor(call.named("self"), call.named("other"))
    return aten.linalg_vector_norm.default(difference, call.named("p"))


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norm of each tensor, in its dtype if none is given. Every rank calls this."""
    places: dict[DeviceMesh | torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        distributed = isinstance(tensor, DISTRIBUTED)
        place = layout_of(tensor).mesh if distributed else tensor.device
        places.setdefault(place, []).append(index)
    results: list[Tensor | None] = [None] * len(tensors)
    for place, indices in places.items():
        chosen = [tensors[index] for index in indices]
        mesh = None if isinstance(place, torch.device) else place
        powers = _powers(chosen, order) if mesh is None else _powers_on(mesh, chosen, order)
        wide = powers if math.isinf(order) else powers.pow(1.0 / order)
        dtypes = [dtype or tensor.dtype for tensor in chosen]
        for index, found in zip(indices, _handed_out(wide, dtypes, mesh), strict=True):
            results[index] = found
    return cast("list[Tensor]", results)


def _any_complex(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype.is_complex for tensor in tensors)


def _handed_out(
    wide: Tensor, dtypes: Sequence[torch.dtype], mesh: DeviceMesh | None
) -> list[Tensor]:
    """Return the elements of a vector as tensors of their own, whole on every rank of a mesh."""
    narrow = {dtype: wide.to(dtype).unbind() for dtype in dict.fromkeys(dtypes)}
    found = [narrow[dtype][index] for index, dtype in enumerate(dtypes)]
    if mesh is None:
        return found
    scalar = {dtype: layout(mesh, replicated(mesh), (), (), dtype) for dtype in narrow}
    return [wrap(each, scalar[dtype]) for each, dtype in zip(found, dtypes, strict=True)]


def _powers_on(mesh: DeviceMesh, tensors: Sequence[Tensor], order: float) -> Tensor:
    """Return the powers of distributed tensors, added up over the ranks of ``mesh``."""
    complete = [settled(tensor) for tensor in tensors]
    placements = [layout_of(tensor).placements for tensor in complete]
    axes = tuple(
        axis for axis in range(mesh.ndim) if any(is_sharded(each[axis]) for each in placements)
    )

    def own(coordinate: tuple[int, ...], locals_: Sequence[Tensor]) -> Tensor:
        # Ranks that hold a copy contribute nothing.
        later = [axis for axis in axes if coordinate[axis]]
        counted = [
            None if any(not is_sharded(each[axis]) for axis in later) else local
            for each, local in zip(placements, locals_, strict=True)
        ]
        return _powers(counted, order, like=locals_[0])

    rows = all_gather_rows(
        per_rank(own, mesh, [tensor._local_tensor for tensor in complete]), mesh, axes
    )
    combine: Callable[[Tensor, Tensor], Tensor]
    combine = torch.maximum if math.isinf(order) else torch.add
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    return total


def _powers(
    tensors: Sequence[Tensor | None], order: float, *, like: Tensor | None = None
) -> Tensor:
    """Return the order-th power of each tensor's norm, in float64: (tensors,). None has none."""
    cut = [() if tensor is None else _pieces(tensor) for tensor in tensors]
    pieces = [piece for each in cut for piece in each]
    norms = aten._foreach_norm.Scalar(pieces, order, torch.float64) if pieces else ()
    if any(len(each) > 1 for each in cut):
        of_tensors = torch.stack(norms).split([len(each) for each in cut if each])
        norms = aten._foreach_norm.Scalar(of_tensors, order)
    device = next(tensor for tensor in (like, *tensors) if tensor is not None).device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    found = iter(norms)
    wide = torch.stack([next(found) if each else zero for each in cut])
    return wide if math.isinf(order) else wide.pow(order)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    numel = tensor.numel()
    if not numel:
        return ()
    if numel <= _PIECE or tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_PIECE)


HANDLERS: dict[OpOverload, Plan] = dict.fromkeys(
    (
        aten.linalg_vector_norm.default,
        aten._foreach_norm.Scalar,
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dtype,
    ),
    norm,
)
DECOMPOSED: dict[OpOverload, Plan] = {aten.dist.default: _distance}
