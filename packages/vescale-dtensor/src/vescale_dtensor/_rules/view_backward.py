"""Put a tensor where a view of a larger one is: gradients of views, and slice_scatter.

Along dims that the view keeps, every rank does so with its part. Where the view takes some
indices of a dim, and that dim is cut, the larger tensor is made, and a view of it written: then
what a rank gets is what it has of the view, as when the view was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor._caches import forget_with_world
from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._layout.boxes import local_shape
from vescale_dtensor._layout.layout import Layout, Placements, layout
from vescale_dtensor._layout.placements import RaggedShard, is_sharded, on_dim, single_dim
from vescale_dtensor._redistribute.plan import redistribution_numel
from vescale_dtensor._sharding.op_call import OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._tensor.dtensor import DTensor, as_dtensor, layout_of, wrap
from vescale_dtensor._torch_private import OpOverload

from .view import RULES as VIEW_RULES

aten = torch.ops.aten

# Operators and the views that they are about.
_BACKWARD = {
    aten.slice_backward.default: aten.slice.Tensor,
    aten.select_backward.default: aten.select.int,
}
_SCATTER = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}


def _dropping(call: OpCall, sizes: tuple[int, ...], dims: set[int], *appended: None) -> Signature:
    """Return the signature of a gradient: letters are dims of the result but those viewed."""
    base = tuple(None if dim in dims else dim for dim in range(len(sizes)))
    grad = (*(letter for letter in base if letter is not None), *appended)
    return _backward(call, grad, base)


def _backward(call: OpCall, grad: Dims, base: Dims) -> Signature:
    def arguments(local: RankView) -> dict[str, Any]:
        return {"input_sizes": local.outputs[0].local_shape(local.coordinate)}

    return Signature((grad,), (base,), linear=(frozenset({0}),), arguments=arguments)


def _slice_backward(call: OpCall) -> Signature | None:
    sizes, dim = _sizes_and_dim(call)
    if _is_cut(call.layouts[0], dim):
        return None
    base = tuple(None if d == dim else d for d in range(len(sizes)))
    return _backward(call, base, base)


def _select_backward(call: OpCall) -> Signature | None:
    # A row of a tensor whose rows are cut is ragged: all of it on one rank.
    if any(isinstance(p, RaggedShard) for p in call.layouts[0].placements):
        return None
    sizes, dim = _sizes_and_dim(call)
    return _dropping(call, sizes, {dim})


def _diagonal_backward(call: OpCall) -> Signature:
    sizes = tuple(call.named("input_sizes"))
    dims = {call.named(name) % len(sizes) for name in ("dim1", "dim2")}
    return _dropping(call, sizes, dims, None)


def _unfold_backward(call: OpCall) -> Signature:
    sizes, dim = tuple(call.named("input_sizes")), call.named("dim")
    base = tuple(None if d == dim % max(len(sizes), 1) else d for d in range(len(sizes)))
    return _backward(call, (*base, None) if sizes else (None,), base)


def _slice_scatter(call: OpCall) -> Signature | None:
    letters = range(len(call.layouts[0].shape))
    dim = call.named("dim") % len(letters)
    if any(_is_cut(made, dim) for made in call.layouts):
        return None
    base = tuple(None if d == dim else d for d in letters)
    return Signature((base, base), (base,), linear=(frozenset({0, 1}),))


def _select_scatter(call: OpCall) -> Signature | None:
    letters = range(len(call.layouts[0].shape))
    dim = call.named("dim") % len(letters)
    if _is_cut(call.layouts[0], dim):
        return None
    base = tuple(None if d == dim else d for d in letters)
    row = tuple(d for d in letters if d != dim)
    return Signature((base, row), (base,), linear=(frozenset({0, 1}),))


def _diagonal_scatter(call: OpCall) -> Signature:
    letters = range(len(call.layouts[0].shape))
    dims = {call.named(name) % len(letters) for name in ("dim1", "dim2")}
    base = tuple(None if d in dims else d for d in letters)
    source = (*(d for d in letters if d not in dims), None)
    return Signature((base, source), (base,), linear=(frozenset({0, 1}),))


def _sizes_and_dim(call: OpCall) -> tuple[tuple[int, ...], int]:
    sizes = tuple(call.named("input_sizes"))
    return sizes, call.named("dim") % max(len(sizes), 1)


def _is_cut(made: Layout, dim: int) -> bool:
    return any(is_sharded(p) and single_dim(p) in (dim, None) for p in made.placements)


def _write_gradient(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Make zeros and write the gradient to the view of them."""
    call = OpCall(func, args, kwargs)
    grad = as_dtensor(args[0])
    sizes = tuple(call.named("input_sizes"))
    options = tuple(call.named(each.name) for each in func._schema.arguments[2:])
    made = _gradient_layout(_BACKWARD[func], layout_of(grad), sizes, options)
    mesh = made.mesh

    def zeros(coordinate: tuple[int, ...], local: torch.Tensor) -> torch.Tensor:
        return local.new_zeros(made.local_shape(coordinate))

    whole = wrap(per_rank(zeros, mesh, grad._local_tensor), made)
    _BACKWARD[func](whole, *options).copy_(grad)
    return whole


def _write_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Copy the tensor and write to a view of the copy."""
    call = OpCall(func, args, kwargs)
    whole = args[0].clone(memory_format=torch.contiguous_format)
    options = tuple(call.named(each.name) for each in func._schema.arguments[2:])
    _SCATTER[func](whole, *options).copy_(args[1])
    return whole


@lru_cache(maxsize=1 << 12)
def _gradient_layout(
    view: OpOverload, grad: Layout, sizes: tuple[int, ...], options: tuple[Any, ...]
) -> Layout:
    """Return a layout whose view has the placements of ``grad``, or is not far from them."""
    replicas = (Replicate(),) * grad.mesh.ndim
    base = layout(grad.mesh, replicas, sizes, None, grad.dtype)
    # Rules look at layouts only: any local tensor will do.
    nothing = torch.empty(0, dtype=grad.dtype, device=grad.mesh.device_type)
    call = OpCall(view, (wrap(nothing, base), *options), {})
    place: Callable[[Placements], Any] = VIEW_RULES[view](call).place
    best: tuple[int, Placements] | None = None
    axes = range(grad.mesh.ndim)
    for placements in product(*(_candidates(grad, sizes, options, axis) for axis in axes)):
        placed = place(placements)
        if placed is None:
            continue
        if placed[0] == grad.placements:
            return base.placed(placements)
        numel = redistribution_numel(
            tuple(grad.shape), tuple(grad.mesh.shape), grad.placements, placed[0]
        )
        if best is None or numel < best[0]:
            best = numel, placements
    assert best is not None, "a view of a whole tensor can always be made"
    return base.placed(best[1])


forget_with_world(_gradient_layout.cache_clear)


def _candidates(
    grad: Layout, sizes: tuple[int, ...], options: tuple[Any, ...], axis: int
) -> Iterator[Placement]:
    """Yield where the larger tensor may be, the most usual first."""
    placement = grad.placements[axis]
    if not is_sharded(placement):
        yield placement
        return
    dims = range(len(sizes))
    yield from (Shard(dim) for dim in dims)
    if single_dim(placement) is not None:
        yield from (on_dim(placement, dim) for dim in dims if _fits(placement, sizes[dim]))
    viewed_size = sizes[options[0] % len(sizes)]
    if isinstance(placement, RaggedShard) and len(placement.dims) == 1 and viewed_size:
        yield _stretched(grad, axis, sizes, options)
    yield Replicate()


def _fits(placement: Placement, size: int) -> bool:
    try:
        local_shape((size,), (_num_ranks(placement),), (0,), (on_dim(placement, 0),))
    except ValueError:
        return False
    return True


def _num_ranks(placement: Placement) -> int:
    return len(placement.local_units) if isinstance(placement, RaggedShard) else 1


def _stretched(
    grad: Layout, axis: int, sizes: tuple[int, ...], options: tuple[Any, ...]
) -> Placement:
    """Return a ragged cut of the viewed dim that gives every rank what it has of the gradient."""
    placement = grad.placements[axis]
    assert isinstance(placement, RaggedShard)
    dim = options[0] % len(sizes)
    size, units = sizes[dim], placement.local_units
    last = max(rank for rank, count in enumerate(units) if count)
    if len(grad.shape) < len(sizes):  # one row, on one rank
        return RaggedShard((dim,), 1, tuple(size * (rank == last) for rank in range(len(units))))
    start, _, step = slice(*options[1:]).indices(size)
    bounds = [0]
    for rank in range(len(units)):
        taken = sum(units[: rank + 1]) * placement.granularity
        bounds.append(size if rank >= last else min(size, start + step * taken))
    counts = tuple(upper - lower for lower, upper in pairwise(bounds))
    return RaggedShard((dim,), 1, counts)


RULES: dict[OpOverload, Any] = {
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.unfold_backward.default: _unfold_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
}
DECOMPOSED: dict[OpOverload, Any] = {
    **dict.fromkeys(_BACKWARD, _write_gradient),
    **dict.fromkeys(_SCATTER, _write_copy),
}
