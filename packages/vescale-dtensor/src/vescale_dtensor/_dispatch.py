"""What an operator does to distributed tensors: local, reduced, gathered, or refused.

[Note: four classes of operators]
1. Pointwise on tensors of one layout: runs on the local parts, nothing is sent.
2. Norms over the whole tensor: local sums in float64, one ordered reduction for a list.
3. Anything else that only reads: gathers its inputs, computes on the full tensors and
   returns a plain tensor. Anything else that writes: the same, and the result is cut again.
   Both warn once per operator with the bytes gathered.
4. Views: refused, because a write through a view of gathered data would be lost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._collectives import ordered_all_reduce
from ._dtensor import DTensor, distribute_tensor, gather, wrap
from ._torch_private import pytree

aten = torch.ops.aten

# Not tagged pointwise by torch, yet element i of the output depends on element i alone.
_LOCAL = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.copy_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
}
_NORMS = {
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
}


class GatherWarning(UserWarning):
    """An operator without a local rule gathered its inputs."""


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an aten operator of which at least one argument is a DTensor."""
    if func in _NORMS:
        return _norm(func, args, kwargs)
    if _writes_plain_tensor(func, args, kwargs):
        return _gathered(func, args, kwargs)
    if _is_foreach_elementwise(func):
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        aligned = all(_share_layout(position) for position in zip(*lists, strict=True))
        return (_local_lists if aligned else _gathered)(func, args, kwargs)
    if _is_elementwise(func) and _share_layout(_tensors((args, kwargs))):
        return _local(func, args, kwargs)
    return _gathered(func, args, kwargs)


def _is_elementwise(func: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func in _LOCAL or torch.Tag.pointwise in func.tags


def _is_foreach_elementwise(func: Any) -> bool:
    prefix, _, name = func.name().partition("_foreach_")
    if prefix != "aten::":
        return False
    name = name.partition(".")[0].rstrip("_")
    if name in ("norm", "max", "powsum"):
        return False
    packet = getattr(aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return name in ("copy", "zero") or any(torch.Tag.pointwise in o.tags for o in overloads)


def _writes_plain_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator writes into an argument that is whole on every rank."""
    return any(
        isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
        for written in _written(func, args, kwargs)
        for tensor in pytree.tree_leaves(written)
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes into."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _share_layout(inputs: Iterable[object]) -> bool:
    """Whether element i of every input sits at the same place, on the same rank.

    Scalars and plain scalar tensors go with everything; a plain tensor of the global shape
    is whole on every rank and can be cut.
    """
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not sharded:
        return True
    first = sharded[0]
    layouts = {(t.device_mesh, t.placements, t.shape) for t in sharded}
    return len(layouts) == 1 and all(
        t.ndim == 0 or t.shape == first.shape for t in tensors if not isinstance(t, DTensor)
    )


def _localize(leaf: Any, like: DTensor) -> Any:
    """Return this rank's part of an argument that shares the layout of ``like``."""
    if isinstance(leaf, DTensor):
        return leaf._local_tensor
    if isinstance(leaf, Tensor) and leaf.ndim:
        return distribute_tensor(leaf, like.device_mesh, like.placements)._local_tensor
    return leaf


def _local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = next(t for t in _tensors((args, kwargs)) if isinstance(t, DTensor))
    local_args, local_kwargs = pytree.tree_map(lambda x: _localize(x, like), (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return _written(func, args, kwargs)[0]

    def rewrap(leaf: Any) -> Any:
        return wrap(leaf, like.device_mesh, like.placements, like.shape)

    return pytree.tree_map_only(Tensor, rewrap, result)


def _local_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operator: position i of every list shares one layout."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    likes = [
        next((t for t in position if isinstance(t, DTensor)), None)
        for position in zip(*lists, strict=True)
    ]

    def localize(arg: Any) -> Any:
        if not isinstance(arg, list | tuple):
            return arg
        return [
            x if like is None else _localize(x, like) for x, like in zip(arg, likes, strict=True)
        ]

    result = func(*map(localize, args), **kwargs)
    if result is None or func._schema.is_mutable:
        return None
    return [
        part if like is None else wrap(part, like.device_mesh, like.placements, like.shape)
        for part, like in zip(result, likes, strict=True)
    ]


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on full tensors; write back what the operator mutated."""
    schema = func._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        raise NotImplementedError(
            f"{func} makes a view of a distributed tensor, and a write through it would be "
            "lost; use full_tensor() to read or to_local() for this rank's part"
        )
    full: dict[int, Tensor] = {}
    for tensor in _tensors((args, kwargs)):
        if isinstance(tensor, DTensor):
            full[id(tensor)] = gather(tensor)
    _warn(func, full.values())

    def fill(leaf: Any) -> Any:
        return full[id(leaf)] if isinstance(leaf, DTensor) else leaf

    full_args, full_kwargs = pytree.tree_map(fill, (args, kwargs))
    result = func(*full_args, **full_kwargs)
    if not schema.is_mutable:
        return result
    for tensor in _tensors((args, kwargs)):
        if isinstance(tensor, DTensor):
            part = distribute_tensor(full[id(tensor)], tensor.device_mesh, tensor.placements)
            tensor._local_tensor.copy_(part._local_tensor)
    return _written(func, args, kwargs)[0] if result is not None else None


_warned: set[Any] = set()


def _warn(func: Any, gathered: Iterable[Tensor]) -> None:
    if func in _warned:
        return
    _warned.add(func)
    nbytes = sum(tensor.nbytes for tensor in gathered)
    warnings.warn(
        f"{func} has no local rule; its inputs were gathered ({nbytes} bytes a rank)",
        GatherWarning,
        stacklevel=2,
    )


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the p-norm of each distributed tensor as a plain scalar on every rank."""
    given = {
        a.name: value for a, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs
    many = func is aten._foreach_norm.Scalar
    order_given = given.get("ord", given.get("p"))
    order = 2.0 if order_given is None else float(order_given)
    if given.get("dim") is not None or given.get("keepdim") or order <= 0:
        return _gathered(func, args, kwargs)
    tensors: Sequence[Tensor] = given["self"] if many else [given["self"]]
    norms = whole_norms(tensors, order)
    dtype = given.get("dtype")
    results = [n.to(dtype or t.dtype) for n, t in zip(norms, tensors, strict=True)]
    return results if many else results[0]


def whole_norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each tensor, accumulated in float64, as float64 scalars.

    One ordered reduction per mesh for all tensors together. Every rank must call this.
    """
    results: list[Tensor | None] = [None] * len(tensors)
    meshes: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            meshes.setdefault(tensor.device_mesh, []).append(index)
        else:
            results[index] = _root(_powers(tensor, order), order)
    for mesh, indices in meshes.items():
        parts = torch.stack([_own_powers(cast(DTensor, tensors[i]), order) for i in indices])
        combine: Callable[[Tensor, Tensor], Tensor]
        combine = torch.maximum if math.isinf(order) else torch.add
        totals = _root(ordered_all_reduce(parts, mesh, combine=combine), order)
        for index, total in zip(indices, totals.unbind(), strict=True):
            results[index] = total
    return cast("list[Tensor]", results)


def _own_powers(tensor: DTensor, order: float) -> Tensor:
    """Return this rank's contribution; ranks that hold a copy contribute nothing."""
    local = tensor._local_tensor
    if local.numel() == 0 or not tensor.is_first_replica:
        return torch.zeros((), dtype=torch.float64, device=local.device)
    return _powers(local, order)


def _powers(tensor: Tensor, order: float) -> Tensor:
    wide = tensor.detach().to(torch.float64).abs()
    if wide.numel() == 0:
        return wide.new_zeros(())
    return wide.max() if math.isinf(order) else wide.pow(order).sum()


def _root(powers: Tensor, order: float) -> Tensor:
    return powers if math.isinf(order) else powers.pow(1.0 / order)
