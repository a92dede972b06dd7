"""New tensors that take dtype, device and placements after another one, and copies of views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._layout.layout import Layout, layout, replicated
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView, variant
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._sharding.view_plan import View
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, wrap
from vescale_dtensor._torch_private import OpOverload

from .view import RULES as VIEW_RULES

aten = torch.ops.aten

_NEW = (
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
)  # fmt: skip


def _new(call: OpCall) -> Signature | None:
    """The same shape: the same placements."""
    made = call.layouts[0]
    if tuple(call.outputs[0].shape) != tuple(made.shape) or _is_for_a_copy(call.func, made):
        return None
    letters = tuple(range(len(made.shape)))

    def arguments(local: RankView) -> dict[str, Any]:
        shape = local.outputs[0].local_shape(local.coordinate)
        if call.func is not aten.new_empty_strided.default:
            return {"size": shape}
        return {"size": shape, "stride": _strides_like(shape, call.named("stride"))}

    return Signature((letters,), (letters,), arguments=arguments, reads=False)


def _strides_like(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return dense strides for ``shape`` with dims in memory in the order of ``like``."""
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _is_for_a_copy(func: OpOverload, made: Layout) -> bool:
    """Whether autograd makes room for a gradient with pending sums, which are to stay pending.

    ``new_empty_strided`` is what it copies gradients to whose strides are not those of the leaf.
    """
    return func is aten.new_empty_strided.default and made.is_partial


def _new_pending(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    made = layout_of(args[0])

    def make(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
        shape = made.local_shape(coordinate)
        return func(local, shape, _strides_like(shape, args[2]), *args[3:], **kwargs)

    local = per_rank(make, made.mesh, args[0]._local_tensor)
    return wrap(local, layout(made.mesh, made.placements, made.shape, args[2], local.dtype))


def _new_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Another shape: whole on every rank. Nothing is read, so nothing has to move."""
    like = args[0]
    assert isinstance(like, DTensor)
    mesh = layout_of(like).mesh
    if _is_for_a_copy(func, layout_of(like)) and tuple(args[1]) == tuple(like.shape):
        return _new_pending(func, args, kwargs)
    made = per_rank(lambda _, local: func(local, *args[1:], **kwargs), mesh, like._local_tensor)
    return wrap(made, layout(mesh, replicated(mesh), made.shape, made.stride(), made.dtype))


def _copying(rule: Callable[[OpCall], View | None]) -> Callable[[OpCall], View | None]:
    """Return the rule of what copies the view that ``rule`` is about."""

    def copied(call: OpCall) -> View | None:
        view = rule(call)
        if view is None or view.function is None:
            return view
        make = view.function

        def function(local: RankView) -> Function:
            show = make(local)

            def run(*args: Any, **kwargs: Any) -> Any:
                shown = show(*args, **kwargs)
                return shown.clone() if isinstance(shown, Tensor) else [s.clone() for s in shown]

            return run

        return View(view.place, view.arguments, function)

    return copied


def _narrow_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return aten.narrow.default(*args, **kwargs).clone(memory_format=torch.contiguous_format)


def _copies() -> Iterator[tuple[OpOverload, Any]]:
    """Yield the rules of operators that are named after a view and copy what it shows."""
    for func, rule in VIEW_RULES.items():
        if copy := variant(func, "_copy"):
            yield copy, _copying(rule)


RULES: dict[OpOverload, Any] = {**dict.fromkeys(_NEW, _new), **dict(_copies())}
DECOMPOSED: dict[OpOverload, Any] = {
    **dict.fromkeys(_NEW, _new_whole),
    aten.narrow_copy.default: _narrow_copy,
}
