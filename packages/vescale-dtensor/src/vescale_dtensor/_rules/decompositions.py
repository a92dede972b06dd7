"""What decompositions are made of: nothing pending, and steps that ranks take on their parts.

[Note: decompositions] An operator over a dim that is cut often is a few reductions and something
pointwise: softmax is a maximum, a sum and a quotient. Then only what is reduced moves, which is
smaller than the tensor by the size of the dim. What is used twice has to be settled first, or
it is reduced twice. Half precision is computed in float32, as the operators themselves do, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from vescale_dtensor._caches import forget_with_world
from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._layout.boxes import local_boxes
from vescale_dtensor._layout.layout import Layout, Placements, without_partial
from vescale_dtensor._layout.placements import is_sharded, on_dim, single_dim
from vescale_dtensor._sharding.local_plan import distributed, plan_of_spec
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Signature, choose
from vescale_dtensor._tensor.dtensor import DTensor, as_dtensor, layout_of, redistributed, wrap
from vescale_dtensor._tensor.pending_sums import moved
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload, pytree

HALF = (torch.float16, torch.bfloat16)


def settled(tensor: Any) -> Any:
    """Return a tensor with nothing pending. Every rank of its mesh must call this."""
    if not isinstance(tensor, DISTRIBUTED):
        return tensor
    ours = as_dtensor(tensor)
    made = layout_of(ours)
    return moved(ours, made.placed(without_partial(made.placements))) if made.is_partial else ours


def widened(tensor: Any) -> Any:
    """Return a half precision tensor in float32."""
    return tensor.to(torch.float32) if tensor is not None and tensor.dtype in HALF else tensor


def statistics_dtype(call: OpCall, place: int) -> torch.dtype:
    """Return the dtype of a normalization's moments, which are its results from ``place`` on.

    Kernels of CPUs do not keep them as meta tensors say, but as the parameters are.
    """
    if call.tensors[0].device.type != "cpu":
        return call.outputs[place].dtype
    names = ("weight", "bias", "running_mean", "running_var", "input")
    return next(each.dtype for each in map(call.named, names) if each is not None)


def single_dims(placements: Placements) -> Placements:
    """Return placements of which none cuts several dims as one: such an axis is given up."""
    return tuple(Replicate() if is_sharded(p) and single_dim(p) is None else p for p in placements)


def along_single_dims(tensor: DTensor) -> DTensor:
    """Return ``tensor`` with no placement that cuts several dims as one. All ranks call this."""
    return redistributed(tensor, single_dims(layout_of(tensor).placements))


def cut_dims(made: Layout) -> frozenset[int]:
    """Return the dims that a placement cuts; one that cuts several dims as one does not count."""
    found = [single_dim(placement) for placement in made.placements if is_sharded(placement)]
    return frozenset(dim for dim in found if dim is not None)


def is_cut(made: Layout, dims: Iterable[int]) -> bool:
    """Whether a placement cuts one of ``dims``."""
    return not cut_dims(made).isdisjoint(dims)


def by_signature(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
) -> Any:
    """Run an operator by a signature that is good for these arguments only."""
    call = OpCall(func, args, kwargs)
    op_spec = choose(call, signature)
    assert op_spec is not None
    return plan_of_spec(call, signature, op_spec)(func, args, kwargs)


def as_distributed(call: OpCall, name: str) -> Any:
    """Return the tensor argument ``name`` with nothing pending, as if whole if it is plain.

    None if it was not given, which the schema of an operator rules out for most.
    """
    found = call.named(name)
    return None if found is None else settled(distributed(found, call))


def wanted(results: Iterable[Any], mask: Iterable[bool]) -> tuple[Any, ...]:
    """Return the results that ``mask``, the ``output_mask`` of a backward, asks for."""
    return tuple(each if asked else None for each, asked in zip(results, mask, strict=True))


def dims_of_call(call: OpCall, ndim: int) -> frozenset[int]:
    """Return the dims that the argument ``dim`` means; all if it is missing or empty."""
    given = call.named("dim")
    dims = (given,) if isinstance(given, int) else given
    return frozenset(dim % max(ndim, 1) for dim in (dims or range(ndim)))


@lru_cache(maxsize=1 << 12)
def held_ranges(
    made: Layout, coordinate: tuple[int, ...], dim: int
) -> tuple[tuple[int, int], ...]:
    """Return which indices of ``dim`` a rank holds, in the order of its local tensor."""
    placements = [
        on_dim(placement, 0) if is_sharded(placement) and single_dim(placement) == dim
        else Replicate()
        for placement in made.placements
    ]  # fmt: skip
    held = local_boxes((made.shape[dim],), made.mesh.shape, coordinate, placements)
    boxes = [each.box for each in sorted(held, key=lambda each: each.local_offset)]
    return tuple((box.offset[0], box.offset[0] + box.shape[0]) for box in boxes)


forget_with_world(held_ranges.cache_clear)


def positions(made: Layout, coordinate: tuple[int, ...], dim: int, device: torch.device) -> Tensor:
    """Return the indices of ``dim`` that a rank holds, in the order of its local tensor."""
    ranges = [
        torch.arange(start, stop, device=device)
        for start, stop in held_ranges(made, coordinate, dim)
    ]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


def on_parts(
    function: Callable[..., Any], inputs: Sequence[DTensor], outputs: Sequence[Layout]
) -> list[DTensor]:
    """Call ``function(coordinate, *locals)`` on every rank; it returns a tuple of tensors."""
    locals_ = [tensor._local_tensor for tensor in inputs]
    results = per_rank(function, outputs[0].mesh, *locals_)
    return [wrap(local, made) for local, made in zip(results, outputs, strict=True)]


def unless_empty(call: OpCall) -> Callable[[RankView], Function]:
    """Return a ``Signature.function``: zeros where a rank holds nothing of the first tensor.

    Kernels refuse some empty tensors. Results that are empty too need no value, and those that
    are sums over the dim of which the rank has nothing are zero.
    """

    def at(local: RankView) -> Function:
        made, coordinate = local.inputs[0], local.coordinate
        needed = any(prod(result.local_shape(coordinate)) for result in local.outputs)
        others_have_some = prod(made.shape) and not prod(made.local_shape(coordinate))
        return zeros_of(call, local) if others_have_some or not needed else call.func

    return at


def zeros_of(call: OpCall, local: RankView) -> Function:
    """Return a function that gives the rank's results filled with zeros."""
    structure, coordinate, outputs = call.result, local.coordinate, local.outputs

    def zeros(*args: Any, **kwargs: Any) -> Any:
        device = next(
            leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        )
        rest = iter(outputs)

        def make(_: Tensor) -> Tensor:
            made = next(rest)
            shape = made.local_shape(coordinate)
            return torch.zeros(shape, dtype=made.dtype, device=device)

        return pytree.tree_map_only(Tensor, make, structure)

    return zeros
