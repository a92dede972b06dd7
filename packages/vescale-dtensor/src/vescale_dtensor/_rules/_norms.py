"""Norms over whole tensors: added up in float64 in rank order, one collective for a whole list.

So the norm that clips gradients does not depend on how they are distributed, beyond float64
rounding, and a model's hundreds of gradients cost one small all-gather per mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed.tensor as torch_dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._calls import argument_table
from vescale_dtensor._dtensor import DTensor, as_dtensor, layout_of, moved, wrap
from vescale_dtensor._fallback import gathered
from vescale_dtensor._placements import is_sharded
from vescale_dtensor._plan import Plan
from vescale_dtensor._ranks import per_rank
from vescale_dtensor._spec import layout, replicated, without_partial
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload
from vescale_dtensor._transport import gather_rows

from ._moments import norm_over_dims

aten = torch.ops.aten


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
    norms = whole_norms(tensors, order)
    dtype = given.get("dtype")
    results = [_settled(n, t, dtype or t.dtype) for n, t in zip(norms, tensors, strict=True)]
    return results if many else results[0]


def whole_norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the local value, in float64, of the norm of each tensor. Every rank calls this."""
    results: list[Tensor | None] = [None] * len(tensors)
    meshes: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DISTRIBUTED):
            results[index] = _root(_powers(tensor, order), order)
        elif layout_of(tensor).is_replicated:
            results[index] = _root(_powers(tensor._local_tensor, order), order)
        else:
            meshes.setdefault(layout_of(tensor).mesh, []).append(index)
    for mesh, indices in meshes.items():
        settled = [_without_pending(tensors[index]) for index in indices]
        axes = tuple(
            axis
            for axis in range(mesh.ndim)
            if any(is_sharded(tensor.placements[axis]) for tensor in settled)
        )
        rows = gather_rows(torch.stack([_own_powers(t, order, axes) for t in settled]), mesh, axes)
        combine: Callable[[Tensor, Tensor], Tensor]
        combine = torch.maximum if math.isinf(order) else torch.add
        total = rows[0]
        for row in rows[1:]:
            total = combine(total, row)
        for index, each in zip(indices, _root(total, order).unbind(), strict=True):
            results[index] = each
    return cast("list[Tensor]", results)


def _settled(value: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    value = value.to(dtype)
    if not isinstance(tensor, DISTRIBUTED):
        return value
    mesh = layout_of(tensor).mesh
    return wrap(value, layout(mesh, replicated(mesh), (), (), dtype))


def _any_complex(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype.is_complex for tensor in tensors)


def _without_pending(tensor: Tensor) -> DTensor:
    distributed = as_dtensor(cast(torch_dtensor.DTensor, tensor))
    return moved(distributed, without_partial(layout_of(distributed).placements))


def _own_powers(tensor: DTensor, order: float, axes: Sequence[int]) -> Tensor:
    """Return this rank's contribution; ranks that hold a copy contribute nothing."""
    made = layout_of(tensor)

    def powers(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
        copies = any(coordinate[a] for a in axes if not is_sharded(made.placements[a]))
        if local.numel() and not copies:
            return _powers(local, order)
        return torch.zeros((), dtype=torch.float64, device=local.device)

    return per_rank(powers, made.mesh, tensor._local_tensor)


def _powers(tensor: Tensor, order: float) -> Tensor:
    wide = tensor.detach().to(torch.float64).abs()
    if wide.numel() == 0:
        return wide.new_zeros(())
    return wide.max() if math.isinf(order) else wide.pow(order).sum()


def _root(powers: Tensor, order: float) -> Tensor:
    return powers if math.isinf(order) else powers.pow(1.0 / order)


HANDLERS: dict[OpOverload, Plan] = dict.fromkeys(
    (
        aten.linalg_vector_norm.default,
        aten._foreach_norm.Scalar,
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dtype,
    ),
    norm,
)
