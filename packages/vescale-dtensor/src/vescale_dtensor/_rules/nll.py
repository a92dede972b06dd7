"""Negative log likelihood, with the batch or the classes cut.

Scores never move. Where classes are cut (a vocabulary over tensor-parallel ranks), every rank
picks the scores of targets that it holds, and the picks of ranks add up. A mean is divided by
the weight of all targets that count, of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate

from vescale_dtensor._comm.functional import is_traced
from vescale_dtensor._layout.layout import Layout, Placements, layout, replicated, without_partial
from vescale_dtensor._layout.placements import is_sharded, on_dim, single_dim
from vescale_dtensor._sharding.local_plan import distributed
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, redistributed
from vescale_dtensor._torch_private import OpOverload

from .decompositions import (
    HALF,
    as_distributed,
    held_ranges,
    on_parts,
    positions,
    settled,
    single_dims,
)
from .loss import MEAN, NONE

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Picks:
    """Where the elements of scores are that targets pick.

    Attributes:
        scores: The layout of the scores.
        class_dim: Their dim that targets index.
        targets: The placements of targets beside them.
        ignore_index: The target that does not count.
    """

    scores: Layout
    class_dim: int
    targets: Placements
    ignore_index: int

    @property
    def num_classes(self) -> int:
        return self.scores.shape[self.class_dim]

    @property
    def class_axes(self) -> tuple[int, ...]:
        """The mesh axes that cut classes."""
        return tuple(
            axis
            for axis, placement in enumerate(self.scores.placements)
            if is_sharded(placement) and single_dim(placement) == self.class_dim
        )

    def find(
        self, coordinate: tuple[int, ...], target: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return local classes, whether the rank has them, and the weights of targets.

        Local classes are 0 where the rank has none.
        """
        counts = target != self.ignore_index
        in_range = (target >= 0) & (target < self.num_classes)
        _check_targets(target, in_range | ~counts, self.num_classes)
        known = torch.where(counts, target, 0)
        index, held = known, counts
        if self.class_axes:
            ranges = held_ranges(self.scores, coordinate, self.class_dim)
            if len(ranges) == 1:
                index = known - ranges[0][0]
                held = counts & (index >= 0) & (known < ranges[0][1])
            else:
                places = positions(self.scores, coordinate, self.class_dim, target.device)
                lookup = known.new_full((self.num_classes,), -1)
                lookup[places] = torch.arange(len(places), device=target.device)
                index = lookup[known]
                held = counts & (index >= 0)
        own = None if weight is None else torch.where(counts, weight[known], 0)
        return torch.where(held, index, 0), held, own


def _check_targets(target: Tensor, fine: Tensor, num_classes: int) -> None:
    if target.device.type != "cpu" or is_traced(target):  # values that are known later
        aten._assert_async.msg(fine.all(), f"a target is not among {num_classes} classes")
    elif not bool(fine.all()):
        first = int(target[~fine].reshape(-1)[0])
        raise IndexError(
            f"Target {first} is out of bounds: expected 0 to {num_classes - 1}, or ignore_index"
        )


def _picks(call: OpCall) -> _Picks:
    index = call.tensor_index("self")
    assert index is not None
    made = call.layouts[index]
    class_dim = 1 if len(made.shape) > 1 else 0
    # One axis that cuts several dims as one is given up: targets cannot follow it.
    placements = single_dims(without_partial(made.placements))

    def beside(placement: Placement) -> Placement:
        dim = single_dim(placement) if is_sharded(placement) else None
        if dim is None or dim == class_dim:
            return Replicate()
        return on_dim(placement, dim if dim < class_dim else dim - 1)

    return _Picks(
        scores=made.placed(placements),
        class_dim=class_dim,
        targets=tuple(map(beside, placements)),
        ignore_index=call.named("ignore_index"),
    )


def _targets_and_weight(call: OpCall, picks: _Picks) -> list[DTensor]:
    target = redistributed(distributed(call.named("target"), call), picks.targets)
    weight = call.named("weight")
    if weight is None:
        return [target]
    return [target, redistributed(distributed(weight, call), replicated(call.mesh))]


def _forward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    picks = _picks(call)
    scores = redistributed(distributed(call.named("self"), call), picks.scores.placements)
    inputs = [scores, *_targets_and_weight(call, picks)]
    dtype = picks.scores.dtype
    wide = torch.float32 if dtype in HALF else dtype
    reduction = call.named("reduction")

    def picked(
        coordinate: tuple[int, ...], local: Tensor, target: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        index, held, own = picks.find(coordinate, target, weight)
        values = local.new_zeros(target.shape)
        if local.numel():
            values = _pick(local, picks.class_dim, index)
        values = torch.where(held, -values if own is None else -values * own, 0)
        counted = (target != picks.ignore_index).to(wide) if own is None else own.to(wide)
        return values, counted

    def elements(coordinate: tuple[int, ...], *locals_: Tensor) -> tuple[Tensor]:
        return (picked(coordinate, *locals_)[0],)

    def sums(coordinate: tuple[int, ...], *locals_: Tensor) -> tuple[Tensor]:
        values, counted = picked(coordinate, *locals_)
        if any(coordinate[axis] for axis in picks.class_axes):
            counted = torch.zeros_like(counted)  # ranks that share targets count them once
        return (torch.stack([values.to(wide).sum(), counted.sum()]),)

    if reduction == NONE:
        placements = tuple(
            Partial() if axis in picks.class_axes else placement
            for axis, placement in enumerate(picks.targets)
        )
        shape = layout_of(inputs[1]).shape
        (values,) = on_parts(elements, inputs, [layout(call.mesh, placements, shape, None, dtype)])
        return values, _zero(call, dtype)
    pending = tuple(Partial() if is_sharded(p) else p for p in picks.scores.placements)
    (both,) = on_parts(sums, inputs, [layout(call.mesh, pending, (2,), None, wide)])
    total, weight = settled(both).unbind()
    if reduction == MEAN:
        total = total / weight
    return total.to(dtype, copy=True), weight.to(dtype, copy=True)


def _zero(call: OpCall, dtype: torch.dtype) -> DTensor:
    made = layout(call.mesh, replicated(call.mesh), (), (), dtype)
    device = call.tensors[0].device
    return on_parts(lambda _: (torch.zeros((), dtype=dtype, device=device),), [], [made])[0]


def _pick(local: Tensor, class_dim: int, index: Tensor) -> Tensor:
    return local.gather(class_dim, index.unsqueeze(class_dim)).squeeze(class_dim)


def _backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    picks = _picks(call)
    reduction = call.named("reduction")
    grad = as_distributed(call, "grad_output")
    if reduction == NONE:
        grad = redistributed(grad, picks.targets)
    else:
        grad = redistributed(grad, replicated(call.mesh))
    if reduction == MEAN:
        total_weight = as_distributed(call, "total_weight")
        grad = cast(DTensor, grad / total_weight)
    made = picks.scores

    def scattered(
        coordinate: tuple[int, ...], grad: Tensor, target: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor]:
        index, held, own = picks.find(coordinate, target, weight)
        values = torch.where(held, -grad if own is None else -own * grad, 0).to(made.dtype)
        local = values.new_zeros(made.local_shape(coordinate))
        if local.numel():
            dim = picks.class_dim
            local.scatter_(dim, index.unsqueeze(dim), values.unsqueeze(dim))
        return (local,)

    inputs = [grad, *_targets_and_weight(call, picks)]
    contiguous = layout(call.mesh, made.placements, made.shape, None, made.dtype)
    return on_parts(scattered, inputs, [contiguous])[0]


DECOMPOSED: dict[OpOverload, Any] = {
    aten.nll_loss_forward.default: _forward,
    aten.nll_loss2d_forward.default: _forward,
    aten.nll_loss_backward.default: _backward,
    aten.nll_loss2d_backward.default: _backward,
}
