"""Rules of view operators, and of the operators that copy what a view would show.

Letters of dims are their numbers in the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._layout.boxes import local_boxes
from vescale_dtensor._layout.layout import Placements
from vescale_dtensor._layout.placements import RaggedShard, is_sharded, on_dim, single_dim
from vescale_dtensor._layout.reshape import as_shard, reshaped
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims
from vescale_dtensor._sharding.view_plan import View, lettered
from vescale_dtensor._torch_private import OpOverload

aten = torch.ops.aten


def _same(call: OpCall) -> View:
    return View(lambda placements: [placements])


def _transpose(call: OpCall) -> View:
    dims = list(_letters(call))
    if dims:
        first, second = call.args[1] % len(dims), call.args[2] % len(dims)
        dims[first], dims[second] = dims[second], dims[first]
    return View(lettered(_letters(call), [tuple(dims)]))


def _t(call: OpCall) -> View:
    return View(lettered(_letters(call), [tuple(reversed(_letters(call)))]))


def _permute(call: OpCall) -> View:
    letters = _letters(call)
    order = [dim % len(letters) for dim in call.args[1]] if letters else []
    return View(lettered(letters, [tuple(letters[dim] for dim in order)]))


def _unsqueeze(call: OpCall) -> View:
    letters = _letters(call)
    dim = call.args[1] % (len(letters) + 1)
    return View(lettered(letters, [(*letters[:dim], "new", *letters[dim:])]))


def _squeeze(call: OpCall) -> View:
    letters = _letters(call)
    given = call.args[1] if len(call.args) > 1 else list(letters)
    given = [given] if isinstance(given, int) else list(given)
    dropped = {dim % max(len(letters), 1) for dim in given}
    kept = tuple(d for d in letters if d not in dropped or call.layouts[0].shape[d] != 1)
    # A rank's own call must not drop a dim of which it has one index.
    ones = [dim for dim in letters if dim not in kept]
    place = lettered(letters, [kept])
    return View(place, function=lambda _: lambda base, *dims: base.squeeze(ones))


def _expand(call: OpCall) -> View:
    letters = _letters(call)
    shape = tuple(call.outputs[0].shape)
    added = len(shape) - len(letters)
    result: list[Any] = ["new"] * added
    base: list[Any] = []
    for letter, size in zip(letters, shape[added:], strict=True):
        kept = call.layouts[0].shape[letter] == size
        base.append(letter if kept else None)
        result.append(letter if kept else "new")
    return View(
        lettered(tuple(base), [tuple(result)]),
        arguments=lambda local: {"size": _local_shape(local)},
    )


def _unfold(call: OpCall) -> View:
    letters = _letters(call)
    dim = call.args[1] % max(len(letters), 1)
    base = tuple(None if d == dim else d for d in letters)
    return View(lettered(base, [(*base, "window") if letters else ("window",)]))


def _diagonal(call: OpCall) -> View:
    letters = _letters(call)
    dims = {call.named("dim1") % len(letters), call.named("dim2") % len(letters)}
    base = tuple(None if d in dims else d for d in letters)
    return View(lettered(base, [(*(d for d in letters if d not in dims), "diagonal")]))


def _as_real(call: OpCall) -> View:
    return View(_linear(lettered(_letters(call), [(*_letters(call), "parts")])))


def _as_complex(call: OpCall) -> View:
    letters = _letters(call)
    return View(_linear(lettered((*letters[:-1], None), [letters[:-1]])))


def _linear(
    place: Callable[[Placements], list[Placements] | None],
) -> Callable[[Placements], list[Placements] | None]:
    """Return what takes no partial products, which complex numbers have others, nor largest."""

    def linear(placements: Placements) -> list[Placements] | None:
        pending = {each.reduce_op for each in placements if isinstance(each, Partial)}
        return place(placements) if pending <= {"sum", "avg"} else None

    return linear


def _reshape(call: OpCall) -> View:
    shape, target = tuple(call.layouts[0].shape), tuple(call.outputs[0].shape)
    mesh_shape = tuple(call.mesh.shape)

    def place(placements: Placements) -> list[Placements] | None:
        placed = reshaped(shape, target, mesh_shape, placements)
        return None if placed is None else [placed]

    return View(place, arguments=lambda local: {"size": _local_shape(local)})


def _slice(call: OpCall) -> View:
    dim = call.named("dim") % max(len(call.layouts[0].shape), 1)
    size = call.layouts[0].shape[dim]
    start, stop, _ = slice(call.named("start"), call.named("end")).indices(size)
    return _pieces(call, dim, [range(start, max(start, stop), call.named("step"))])


def _split(call: OpCall) -> View:
    dim = call.named("dim") % max(len(call.layouts[0].shape), 1)
    ranges: list[range] = []
    start = 0
    for tensor in call.outputs:
        ranges.append(range(start, start + tensor.shape[dim]))
        start += tensor.shape[dim]
    return _pieces(call, dim, ranges)


def _pieces(call: OpCall, dim: int, ranges: Sequence[range]) -> View:
    """Return the view that has one result per range of indices of ``dim``."""
    shape = tuple(call.layouts[0].shape)
    mesh_shape = tuple(call.mesh.shape)
    whole = all(each == range(shape[dim]) for each in ranges)

    def place(placements: Placements) -> list[Placements] | None:
        axes = _axes_of(placements, dim)
        if axes is None:
            return None
        if not axes or whole:
            return [placements] * len(ranges)
        if len(axes) > 1 or not _is_consecutive(placements[axes[0]]):
            return None
        results: list[Placements] = []
        for indices in ranges:
            units = tuple(
                _count(indices, *run) for run in _runs(shape, mesh_shape, placements, axes[0], dim)
            )
            results.append(_replaced(placements, axes[0], as_shard(dim, units)))
        return results

    def function(local: RankView) -> Function:
        if not _axes_of(local.inputs[0].placements, dim):
            return call.func
        if whole:  # whichever indices a rank has
            slices = [slice(None)] * len(ranges)
        else:
            lower, upper = _own_run(shape, local, dim)
            slices = [_within(indices, lower, upper) for indices in ranges]

        def cut(base: Tensor, *rest: Any, **named: Any) -> Any:
            parts = [base[(slice(None),) * dim + (each,)] for each in slices]
            return parts if call.func._schema.returns[0].type.kind() == "ListType" else parts[0]

        return cut

    return View(place, function=function)


def _select(call: OpCall) -> View:
    letters = _letters(call)
    dim = call.args[1] % len(letters)
    index = call.args[2] % max(call.layouts[0].shape[dim], 1)
    return _selected(call, dim, [index])


def _unbind(call: OpCall) -> View:
    letters = _letters(call)
    dim = call.named("dim") % len(letters)
    return _selected(call, dim, list(range(call.layouts[0].shape[dim])))


def _selected(call: OpCall, dim: int, indices: Sequence[int]) -> View:
    """Return the view that has one result per index of ``dim``, which results lack.

    If the dim is cut, one rank has all of a result and the others nothing: a ragged cut of the
    result's first dim.
    """
    letters = _letters(call)
    shape, mesh_shape = tuple(call.layouts[0].shape), tuple(call.mesh.shape)
    rest = tuple(d for d in letters if d != dim)
    base: Dims = tuple(None if d == dim else d for d in letters)
    keep = lettered(base, [rest])

    def place(placements: Placements) -> list[Placements] | None:
        axes = _axes_of(placements, dim)
        if axes is None or len(axes) > 1:
            return None
        if not axes:
            kept = keep(placements)
            return None if kept is None else kept * len(indices)
        axis = axes[0]
        if not rest or not _is_consecutive(placements[axis]):
            return None
        kept = keep(_replaced(placements, axis, Replicate()))
        if kept is None:
            return None
        results: list[Placements] = []
        for index in indices:
            runs = _runs(shape, mesh_shape, placements, axis, dim)
            units = tuple(int(lower <= index < upper) for lower, upper in runs)
            granularity = max(1, shape[rest[0]])
            results.append(_replaced(kept[0], axis, RaggedShard((0,), granularity, units)))
        return results

    def function(local: RankView) -> Function:
        lower, upper = _own_run(shape, local, dim)

        def select(base: Tensor, *others: Any, **named: Any) -> Any:
            parts = [
                base.select(dim, index - lower) if lower <= index < upper else _nothing(base, dim)
                for index in indices
            ]
            return parts if call.func._schema.returns[0].type.kind() == "ListType" else parts[0]

        return select

    return View(place, function=function)


def _nothing(base: Tensor, dim: int) -> Tensor:
    """Return an empty tensor with the dims of ``base`` but ``dim``."""
    shape = [size for d, size in enumerate(base.shape) if d != dim]
    return base.new_empty((0, *shape[1:]))


def _letters(call: OpCall) -> Dims:
    return tuple(range(len(call.layouts[0].shape)))


def _local_shape(local: RankView) -> tuple[int, ...]:
    return local.outputs[0].local_shape(local.coordinate)


def _axes_of(placements: Placements, dim: int) -> list[int] | None:
    """Return the mesh axes that cut ``dim``, None if one cuts several dims at once."""
    dims = [single_dim(p) if is_sharded(p) else -1 for p in placements]
    if any(d is None for d in dims):
        return None
    return [axis for axis, d in enumerate(dims) if d == dim]


def _is_consecutive(placement: Placement) -> bool:
    return type(placement) is Shard or isinstance(placement, RaggedShard)


def _runs(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Placements, axis: int, dim: int
) -> list[tuple[int, int]]:
    """Return the indices of ``dim`` that each rank of the axis has, as first and last plus one."""
    alone = on_dim(placements[axis], 0)
    runs: list[tuple[int, int]] = []
    stop = 0
    for rank in range(mesh_shape[axis]):
        boxes = local_boxes((shape[dim],), (mesh_shape[axis],), (rank,), (alone,))
        start = boxes[0].box.offset[0] if boxes else stop
        stop = start + (boxes[0].box.shape[0] if boxes else 0)
        runs.append((start, stop))
    return runs


def _own_run(shape: Sequence[int], local: RankView, dim: int) -> tuple[int, int]:
    made = local.inputs[0]
    axes = _axes_of(made.placements, dim)
    if not axes:
        return 0, shape[dim]
    runs = _runs(shape, tuple(made.mesh.shape), made.placements, axes[0], dim)
    return runs[local.coordinate[axes[0]]]


def _within(indices: range, lower: int, upper: int) -> slice:
    """Return the slice of positions in ``lower..upper`` that ``indices`` has there."""
    first = indices.start
    if first < lower:
        first += -(-(lower - first) // indices.step) * indices.step
    stop = min(indices.stop, upper)
    if first >= stop:
        return slice(0, 0)
    return slice(first - lower, stop - lower, indices.step)


def _count(indices: range, lower: int, upper: int) -> int:
    part = _within(indices, lower, upper)
    return len(range(part.start, part.stop, part.step or 1))


def _replaced(placements: Placements, axis: int, placement: Placement) -> Placements:
    return (*placements[:axis], placement, *placements[axis + 1 :])


RULES: dict[OpOverload, Any] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.conj.default: _same,
    aten._conj.default: _same,
    aten._neg_view.default: _same,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.unfold.default: _unfold,
    aten.diagonal.default: _diagonal,
    aten.view_as_real.default: _as_real,
    aten.view_as_complex.default: _as_complex,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
}
