"""Operators that choose elements by an index."""

from __future__ import annotations

import torch

from vescale_parallel._torch_private import FakeTensor
from vescale_parallel._trace.axes.algebra import Dim
from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

from .views import replaced, slice_dim

rule = Rules()

_CHOSEN = "is chosen by an index"


@rule("embedding", linear="first")
def embedding(call: OpCall) -> None:
    weight, index = call.args["weight"], call.args["indices"]
    rows, *columns = call.dims(weight)
    call.step.looked_up = rows
    call.give(call.out, [*call.dims(index), *columns])


@rule("index", "unsafe_index", "index_put", "index_put_impl", "unsafe_index_put",
      linear="first")  # fmt: skip
def index(call: OpCall) -> None:
    source = call.args["self"]
    run = None if call.name.startswith("index_put") else _run(call, call.args["indices"])
    if run is not None:
        at, start = run
        part = slice_dim(call, call.dims(source)[at], start, call.out.shape[at])
        call.give(call.out, replaced(call, source, at, part))
        return
    dims, taken, made = _indexed(call, source, call.args["indices"])
    for d in taken:
        call.block(dims[d], _CHOSEN)
    if call.name.startswith("index_put"):
        call.give(call.out, dims)
        values = call.args["values"]
        call.step.linear = "jointly"
        if values.dim() == len(made):
            for dim, other in zip(made, call.dims(values), strict=True):
                if dim and other:
                    call.unify(dim, other)
        elif values.dim():
            call.block_all((values,))
        return
    if taken == [0] and _is_routed(call, call.args["indices"]):
        call.note_experts(source)
    lengths = [call.axes.length(dim) for dim in made]
    shape = list(call.out.shape)
    call.give(
        call.out,
        [
            dim if n == call.axes.length(dim) else call.whole(n)
            for dim, n in zip(made, shape, strict=True)
        ]
        if len(lengths) == len(shape)
        else [call.whole(n) for n in shape],
    )


def _run(call: OpCall, indices: list[torch.Tensor | None]) -> tuple[int, int] | None:
    """Return the dim and start of consecutive elements that constants choose, as a slice does."""
    given = [(at, entry) for at, entry in enumerate(indices) if entry is not None]
    if len(given) != 1:
        return None
    at, entry = given[0]
    is_constant = not call.trace.value(entry).from_batch and not isinstance(entry, FakeTensor)
    if not is_constant or entry.dim() != 1 or entry.dtype != torch.int64 or not entry.numel():
        return None
    length = call.args["self"].shape[at]
    chosen: list[int] = [index % length for index in entry.tolist()]
    consecutive = list(range(chosen[0], chosen[0] + len(chosen)))
    return (at, chosen[0]) if chosen == consecutive else None


def _is_routed(call: OpCall, indices: list[torch.Tensor | None]) -> bool:
    """Whether what an index chooses depends on the batch."""
    return any(index is not None and call.trace.value(index).from_batch for index in indices)


def _indexed(
    call: OpCall, source: torch.Tensor, indices: list[torch.Tensor | None]
) -> tuple[tuple[Dim, ...], list[int], list[Dim]]:
    """Return the source's dimensions, those that are indexed, and the result's."""
    dims = call.dims(source)
    taken: list[int] = []
    integers: list[torch.Tensor] = []
    masked = False
    at = 0
    for entry in indices:
        width = 1
        if entry is not None:
            mask = entry.dtype in (torch.bool, torch.uint8)
            width = entry.dim() if mask else 1
            masked |= mask
            taken += range(at, at + width)
            integers.append(entry)
        at += width
    if masked:
        new: list[Dim] = [call.whole(_masked_length(call, dims, taken))]
    else:
        new = _broadcast(call, integers)
    together = taken == list(range(taken[0], taken[0] + len(taken))) if taken else True
    place = taken[0] if taken and together else 0
    rest = [(d, dim) for d, dim in enumerate(dims) if d not in taken]
    before = [dim for d, dim in rest if d < place]
    return dims, taken, [*before, *new, *(dim for d, dim in rest if d >= place)]


def _masked_length(call: OpCall, dims: tuple[Dim, ...], taken: list[int]) -> int:
    kept = len(dims) - len(taken)
    if call.name.startswith("index_put"):
        return call.args["values"].shape[0] if call.args["values"].dim() > kept else 1
    place = taken[0]
    return call.out.shape[place] if call.out.dim() == kept + 1 else 1


def _broadcast(call: OpCall, indices: list[torch.Tensor]) -> list[Dim]:
    width = max((entry.dim() for entry in indices), default=0)
    made: list[Dim] = [()] * width
    for entry in indices:
        for d, dim in enumerate(call.dims(entry)):
            if dim:
                made[width - entry.dim() + d] = dim
    return made


@rule("index_select", linear="first")
def index_select(call: OpCall) -> None:
    source = call.args["self"]
    at = call.args["dim"] % max(source.dim(), 1)
    dims = list(call.dims(source))
    call.block(dims[at], _CHOSEN)
    if at == 0 and _is_routed(call, [call.args["index"]]):
        call.note_experts(source)
    dims[at] = call.dims(call.args["index"])[0] if call.args["index"].dim() else ()
    call.give(call.out, dims)


@rule("gather", "take_along_dim", linear="first")
def gather(call: OpCall) -> None:
    source, chosen = call.args["self"], call.args["index"]
    at = call.args["dim"] % max(source.dim(), 1)
    made: list[Dim] = []
    for d, (dim, other) in enumerate(zip(call.dims(source), call.dims(chosen), strict=True)):
        if d == at:
            call.block(dim, _CHOSEN)
        elif source.shape[d] == chosen.shape[d]:
            call.unify(dim, other)
        else:
            call.block(dim, _CHOSEN)
        made.append(other)
    call.give(call.out, made)


@rule("scatter", "scatter_add", "scatter_reduce", linear="jointly")
def scatter(call: OpCall) -> None:
    target, chosen = call.args["self"], call.args["index"]
    source = call.args.get("src")
    at = call.args["dim"] % max(target.dim(), 1)
    dims = call.dims(target)
    call.give(call.out, dims)
    for d, dim in enumerate(dims):
        if d == at or target.shape[d] != chosen.shape[d]:
            call.block(dim, _CHOSEN)
        else:
            call.unify(dim, call.dims(chosen)[d])
            if isinstance(source, torch.Tensor) and source.shape[d] == target.shape[d]:
                call.unify(dim, call.dims(source)[d])


@rule("index_add", "index_copy", "index_fill", "index_reduce", linear="jointly")
def index_add(call: OpCall) -> None:
    target, source = call.args["self"], call.args.get("source")
    at = call.args["dim"] % max(target.dim(), 1)
    dims = call.dims(target)
    call.give(call.out, dims)
    for d, dim in enumerate(dims):
        if d == at:
            call.block(dim, _CHOSEN)
        elif isinstance(source, torch.Tensor) and source.dim() == target.dim():
            call.unify(dim, call.dims(source)[d])


@rule("masked_scatter")
def masked_scatter(call: OpCall) -> None:
    call.block_all(call.inputs)
    call.give(call.out, call.dims(call.args["self"]))


@rule("slice_scatter", linear="jointly")
def slice_scatter(call: OpCall) -> None:
    target, source = call.args["self"], call.args["src"]
    at = call.args["dim"] % target.dim()
    dims = call.dims(target)
    for d, (dim, other) in enumerate(zip(dims, call.dims(source), strict=True)):
        if d != at:
            call.unify(dim, other)
    call.block(dims[at], "is sliced")
    call.give(call.out, dims)
