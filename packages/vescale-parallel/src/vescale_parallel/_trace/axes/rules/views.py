"""Operators that move elements and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vescale_parallel._trace.axes.algebra import Dim, Segment
from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


@rule(
    "view", "unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten",
    "reshape_alias", "view_copy",
    linear="first",
)  # fmt: skip
def reshape(call: OpCall) -> None:
    source = call.args["self"]
    call.give(call.out, regroup(call, call.dims(source), source.shape, call.out.shape))


def regroup(
    call: OpCall, dims: Sequence[Dim], old: Sequence[int], new: Sequence[int]
) -> list[Dim]:
    """Return a reshaped tensor's dimensions, group by group of equal numel."""
    made: list[Dim] = []
    if math.prod(old) != math.prod(new) or not math.prod(old):  # another dtype, or empty
        for dim in dims:
            call.block(dim)
        return [call.whole(length) for length in new]
    i = j = 0
    while j < len(new):
        start_i, start_j, left, right = i, j, 1, 1
        while left != right or j == start_j:
            if left < right or j == len(new):
                left *= old[i]
                i += 1
            else:
                right *= new[j]
                j += 1
        group = dims[start_i:i]
        found = call.axes.regroup(group, new[start_j:j])
        if found is None:
            for dim in group:
                call.block(dim, "is torn by a view")
            found = [call.whole(length) for length in new[start_j:j]]
        made += found
    return made


@rule("t", "numpy_T", linear="first")
def reverse(call: OpCall) -> None:
    call.give(call.out, call.dims(call.args["self"])[::-1])


@rule("transpose", "transpose_copy", linear="first")
def transpose(call: OpCall) -> None:
    dims = list(call.dims(call.args["self"]))
    one, other = call.args["dim0"], call.args["dim1"]
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    call.give(call.out, dims)


@rule("permute", "permute_copy", linear="first")
def permute(call: OpCall) -> None:
    dims = call.dims(call.args["self"])
    call.give(call.out, [dims[d] for d in call.args["dims"]])


@rule("expand", "expand_copy", linear="first")
def expand(call: OpCall) -> None:
    source, out = call.args["self"], call.out
    new = out.dim() - source.dim()
    dims = call.dims(source)
    call.give(
        out,
        [
            dims[d - new] if d >= new and source.shape[d - new] == n else call.fresh(n)
            for d, n in enumerate(out.shape)
        ],
    )


@rule("repeat", "tile", linear="first")
def repeat(call: OpCall) -> None:
    source, times = call.args["self"], call.args["repeats"]
    new = len(times) - source.dim()
    dims = [()] * new + list(call.dims(source))
    call.give(call.out, [(*call.fresh(n), *dim) for n, dim in zip(times, dims, strict=True)])


@rule("repeat_interleave", linear="first")
def repeat_interleave(call: OpCall) -> None:
    source, times = call.args.get("self"), call.args.get("repeats")
    if source is None or not isinstance(times, int) or call.args["dim"] is None:
        call.block_all(call.inputs)
        return
    dims = list(call.dims(source))
    dims[call.args["dim"]] = (*dims[call.args["dim"]], *call.fresh(times))
    call.give(call.out, dims)


@rule("slice", "narrow", "slice_copy", linear="first")
def slice_(call: OpCall) -> None:
    source = call.args["self"]
    dim = call.args["dim"] % source.dim()
    length = call.out.shape[dim]
    start = call.args["start"] or 0
    start = min(max(start + source.shape[dim] if start < 0 else start, 0), source.shape[dim])
    step = call.args.get("step") or 1
    if step == 1:
        part = slice_dim(call, call.dims(source)[dim], start, length)
    else:
        part = strided(call, call.dims(source)[dim], source.shape[dim], start, step, length)
    call.give(call.out, replaced(call, source, dim, part))


def slice_dim(call: OpCall, dim: Dim, start: int, length: int) -> Dim:
    if not length:
        return call.fresh(0)
    part = call.axes.slice(dim, start, length)
    if part is None:
        call.block(dim, "is sliced across its parts")
        return call.whole(length)
    return part


def strided(call: OpCall, dim: Dim, total: int, start: int, step: int, length: int) -> Dim:
    """Every ``step``-th element: one of the elements of a minor axis of ``step``."""
    if length * step == total and start < step:
        found = call.axes.regroup([dim], [length, step])
        if found is not None:
            call.block(found[1], "is selected by position")
            return found[0]
    call.block(dim, "is sliced with a step")
    return call.whole(length)


def replaced(call: OpCall, source: torch.Tensor, dim: int, by: Dim) -> list[Dim]:
    dims = list(call.dims(source))
    dims[dim] = by
    return dims


@rule(
    "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes",
    "unsafe_chunk", "split_copy", "split_with_sizes_copy",
    linear="first",
)  # fmt: skip
def split(call: OpCall) -> None:
    source = call.args["self"]
    dim = call.args["dim"] % source.dim()
    start = 0
    for out in call.outputs:
        part = slice_dim(call, call.dims(source)[dim], start, out.shape[dim])
        call.give(out, replaced(call, source, dim, part))
        start += out.shape[dim]


@rule("select", "unbind", "select_copy", "unbind_copy", linear="first")
def select(call: OpCall) -> None:
    source = call.args["self"]
    dims = list(call.dims(source))
    dim = call.args["dim"] % source.dim()
    taken = dims.pop(dim)
    call.block(taken, "is selected by position")
    for out in call.outputs:
        call.give(out, dims)


@rule("cat", "concat", "concatenate", linear="jointly")
def cat(call: OpCall) -> None:
    parts = [t for t in call.args["tensors"] if t.dim() == call.out.dim() and t.numel()]
    if not parts:
        return
    at = call.args["dim"] % call.out.dim()
    dims = [call.dims(part) for part in parts]
    for other in dims[1:]:
        for d in range(call.out.dim()):
            if d != at:
                call.unify(dims[0][d], other[d])
    made = list(dims[0])
    made[at] = call.axes.cat(
        [Segment(p.shape[at], d[at]) for p, d in zip(parts, dims, strict=True)]
    )
    call.give(call.out, made)


@rule("stack", linear="jointly")
def stack(call: OpCall) -> None:
    parts: list[torch.Tensor] = call.args["tensors"]
    at = call.args["dim"] % call.out.dim()
    dims = [call.dims(part) for part in parts]
    for other in dims[1:]:
        for one, two in zip(dims[0], other, strict=True):
            call.unify(one, two)
    new = call.fresh(len(parts))
    call.block(new, "is stacked")
    call.give(call.out, [*dims[0][:at], new, *dims[0][at:]])


@rule("constant_pad_nd", linear="first")
def pad(call: OpCall) -> None:
    source, amounts = call.args["self"], call.args["pad"]
    dims = list(call.dims(source))
    for k in range(len(amounts) // 2):
        d = source.dim() - 1 - k
        before, after = amounts[2 * k], amounts[2 * k + 1]
        dim = dims[d]
        if min(before, after) < 0:
            skipped = max(-before, 0)
            kept = source.shape[d] + min(before, 0) + min(after, 0)
            dim = slice_dim(call, dim, skipped, kept)
        if before or after:
            call.block(dim, "is padded")
        around = [Segment(max(n, 0), call.fresh(max(n, 0))) for n in (before, after)]
        length = call.out.shape[d] - around[0].length - around[1].length
        dims[d] = call.axes.cat([around[0], Segment(length, dim), around[1]])
    call.give(call.out, dims)


@rule("unfold", linear="first")
def unfold(call: OpCall) -> None:
    source = call.args["self"]
    at = call.args["dimension"] % source.dim()
    dims = list(call.dims(source))
    call.block(dims[at])
    dims[at] = call.whole(call.out.shape[at])
    call.give(call.out, [*dims, call.whole(call.out.shape[-1])])


@rule("flip", "roll", linear="first")
def reorder(call: OpCall) -> None:
    source = call.args["self"]
    dims = call.dims(source)
    for d in call.args["dims"] or range(source.dim()):
        call.block(dims[d])
    call.give(call.out, dims)


@rule("tril", "triu", linear="first")
def triangle(call: OpCall) -> None:
    dims = call.dims(call.args["self"])
    call.block(dims[-1])
    call.block(dims[-2])
    call.give(call.out, dims)


@rule("view_as_real", "view_as_real_copy", linear="first")
def view_as_real(call: OpCall) -> None:
    part = call.fresh(2)
    call.block(part, "is a real and an imaginary part")
    call.give(call.out, [*call.dims(call.args["self"]), part])


@rule("view_as_complex", "view_as_complex_copy", linear="first")
def view_as_complex(call: OpCall) -> None:
    *dims, part = call.dims(call.args["self"])
    call.block(part, "is a real and an imaginary part")
    call.give(call.out, dims)


@rule("diagonal", "diagonal_copy", linear="first")
def diagonal(call: OpCall) -> None:
    source = call.args["self"]
    one, other = call.args["dim1"] % source.dim(), call.args["dim2"] % source.dim()
    dims = call.dims(source)
    call.block(dims[one])
    call.block(dims[other])
    rest = [dim for d, dim in enumerate(dims) if d not in (one, other)]
    call.give(call.out, [*rest, call.whole(call.out.shape[-1])])
