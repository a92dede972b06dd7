"""View operators: where a view of a distributed tensor is, and which part of it a rank has.

A view of a rank's part is a part of the view for most views, so writes through it reach the base
as on one device. Where it is not, the base is moved and the view follows it, see
gathered_views.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate

from vescale_dtensor._layout.layout import Layout, Placements, layout
from vescale_dtensor._layout.placements import is_sharded, on_dim, single_dim
from vescale_dtensor._redistribute.plan import redistribution_numel
from vescale_dtensor._tensor.dtensor import DTensor, redistributed, wrap
from vescale_dtensor._torch_private import OpOverload, pytree

from .gathered_views import GatheredView
from .local_plan import LocalCall, Plan, distributed, own_function
from .op_call import Function, OpCall, RankView, is_view
from .signature import Dims


@dataclass(frozen=True)
class View:
    """What :func:`plan_view` needs to know of a view operator.

    Attributes:
        place: Returns the placements of every result, given those of the base; None if a
            rank's part of the base does not have what a part of the result needs.
        arguments: The other arguments of a rank's own call, where they differ.
        function: Makes a rank's own call, where it is not the operator itself.
    """

    place: Callable[[Placements], Sequence[Placements] | None]
    arguments: Callable[[RankView], dict[str, Any]] | None = None
    function: Callable[[RankView], Function] | None = None


def lettered(
    base: Dims, results: Sequence[Dims]
) -> Callable[[Placements], list[Placements] | None]:
    """Return the ``place`` of a view that keeps, drops or reorders dims.

    Dims of the base that must be whole, and of results that are new, are None.
    """

    def place(placements: Placements) -> list[Placements] | None:
        placed: list[Placements] = []
        for result in results:
            moved_over: list[Any] = []
            for placement in placements:
                if not is_sharded(placement):
                    moved_over.append(placement)
                    continue
                dim = single_dim(placement)
                letter = None if dim is None or dim >= len(base) else base[dim]
                if letter is None or letter not in result:
                    return None
                moved_over.append(on_dim(placement, result.index(letter)))
            placed.append(tuple(moved_over))
        return placed

    return place


def plan_view(call: OpCall, view: View) -> Plan:
    """Return the plan of a view operator."""
    base = call.layouts[0]
    placements = _placements_to_view(base, view)
    placed = view.place(placements)
    assert placed is not None
    outputs = tuple(
        layout(call.mesh, each, tensor.shape, tensor.stride(), tensor.dtype)
        for each, tensor in zip(placed, call.outputs, strict=True)
    )
    offsets = tuple(int(tensor.storage_offset()) for tensor in call.outputs)
    target = base.placed(placements)
    function = own_function(call, view.arguments, view.function, (target,), outputs)
    if target is base and isinstance(call.tensors[0], DTensor):
        return LocalCall(function, _finisher(call, outputs, offsets), None)

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = OpCall(func, args, kwargs)
        source = distributed(again.tensors[0], again)
        local = redistributed(source, placements)._local_tensor

        def of(whole: Tensor) -> Any:
            return function(whole, *args[1:], **kwargs)

        if not is_view(func):
            return _wrapped(of(local), outputs, offsets, source)
        return _following(of, _wrapped(of(local), outputs, offsets, source), source, placements)

    return run


def _placements_to_view(base: Layout, view: View) -> Placements:
    """Return the placements that move fewest bytes and of which a view can be made."""
    if view.place(base.placements) is not None:
        return base.placements
    axes = [axis for axis, each in enumerate(base.placements) if each != Replicate()]
    for count in range(1, len(axes) + 1):
        found: list[tuple[int, Placements]] = []
        for chosen in combinations(axes, count):
            placements = tuple(
                Replicate() if axis in chosen else placement
                for axis, placement in enumerate(base.placements)
            )
            if view.place(placements) is not None:
                numel = redistribution_numel(
                    tuple(base.shape), tuple(base.mesh.shape), base.placements, placements
                )
                found.append((numel, placements))
        if found:
            return min(found, key=lambda each: each[0])[1]
    raise AssertionError("a view of a whole tensor can always be made")


def _finisher(
    call: OpCall, outputs: tuple[Layout, ...], offsets: tuple[int, ...]
) -> Callable[..., Any]:
    def finish(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        return _wrapped(result, outputs, offsets, args[0])

    def finish_one(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        return wrap(result, outputs[0], offset=offsets[0] + args[0].storage_offset())

    return finish_one if isinstance(call.result, Tensor) else finish


def _wrapped(
    result: Any, outputs: tuple[Layout, ...], offsets: tuple[int, ...], base: DTensor
) -> Any:
    rest = iter(zip(outputs, offsets, strict=True))

    def wrap_next(local: Tensor) -> DTensor:
        made, offset = next(rest)
        return wrap(local, made, offset=offset + int(base.storage_offset()))

    return pytree.tree_map_only(Tensor, wrap_next, result)


def _following(
    of: Callable[[Tensor], Any], views: Any, base: DTensor, placements: Placements
) -> Any:
    """Let views of a base that was moved to ``placements`` follow it."""
    for index, view in enumerate(pytree.tree_leaves(views)):
        view._alias_of = GatheredView(base, of, index, placements)
    return views
