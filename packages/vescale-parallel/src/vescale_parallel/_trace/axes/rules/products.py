"""Operators that multiply and sum: the summed dimension is where a cut axis ends."""

from __future__ import annotations

import itertools

import torch

from vescale_parallel._trace.axes.algebra import Dim
from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


def contract(call: OpCall, one: Dim, other: Dim) -> None:
    call.unify(one, other)
    call.contract(one)


@rule("mm", "bmm", "matmul", "mv", "dot", "vdot", linear="each")
def matmul(call: OpCall) -> None:
    left, right = call.inputs[:2]
    call.give(call.out, _matmul(call, left, right))


@rule("addmm", "baddbmm", "addmv", "addbmm", linear="each")
def addmm(call: OpCall) -> None:
    bias, left, right = call.inputs[:3]
    dims = _matmul(call, left, right)
    for one, other in zip(reversed(dims), reversed(call.dims(bias)), strict=False):
        if other:
            call.unify(one, other)
    call.give(call.out, dims)


def _matmul(call: OpCall, left: torch.Tensor, right: torch.Tensor) -> list[Dim]:
    a, b = call.dims(left), call.dims(right)
    contract(call, a[-1], b[0] if right.dim() == 1 else b[-2])
    if right.dim() == 1:
        return list(a[:-1])
    batch: list[Dim] = []
    if left.dim() == right.dim() == 3:
        call.unify(a[0], b[0])
        batch = [a[0] or b[0]]
        for tensor in (left, right):
            call.note_experts(tensor)
    return [*batch, *a[len(batch) : -1], b[-1]]


@rule("linalg_solve_triangular", linear="last")
def solve_triangular(call: OpCall) -> None:
    """Each right-hand side of each system is solved by itself."""
    system, right = call.args["self"], call.args["B"]
    a, b = call.dims(system), list(call.dims(right))
    unknowns = -2 if call.args["left"] else -1
    for dim in (*a[-2:], b[unknowns]):
        call.block(dim)
    systems = itertools.zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=())
    batch = [_broadcast(call, one, other) for one, other in systems]
    call.give(call.out, [*reversed(batch), *b[-2:]])


def _broadcast(call: OpCall, one: Dim, other: Dim) -> Dim:
    if one and other:
        call.unify(one, other)
    return one or other


@rule("linear", linear="each")
def linear(call: OpCall) -> None:
    x, weight, bias = call.args["input"], call.args["weight"], call.args["bias"]
    dims, (rows, columns) = call.dims(x), call.dims(weight)
    contract(call, dims[-1], columns)
    if bias is not None:
        call.unify(rows, call.dims(bias)[0])
    call.give(call.out, [*dims[:-1], rows])


@rule("grouped_mm", linear="each")
def grouped_mm(call: OpCall) -> None:
    left, right = call.inputs[:2]
    a, b = call.dims(left), call.dims(right)
    contract(call, a[-1], b[-2])
    if left.dim() == 2 and right.dim() == 3:
        call.note_experts(right)
        call.block(b[0], "is chosen by an index")
        call.give(call.out, [a[0], b[2]])
    else:
        call.block_all((left, right))


@rule("convolution", linear="each")
def convolution(call: OpCall) -> None:
    x, weight, bias = call.args["input"], call.args["weight"], call.args["bias"]
    groups, transposed = call.args["groups"], call.args["transposed"]
    dims, kernel = call.dims(x), call.dims(weight)
    new = kernel[1] if transposed else kernel[0]
    if groups == 1:
        contract(call, dims[1], kernel[0] if transposed else kernel[1])
    elif groups == x.shape[1] and not transposed:
        regrouped = call.axes.regroup([new], [groups, weight.shape[0] // groups])
        if regrouped is None:
            call.block(new)
        else:
            call.unify(dims[1], regrouped[0])
    else:
        call.block_all((x, weight))
        new = call.whole(call.out.shape[1])
    if bias is not None:
        call.unify(new, call.dims(bias)[0])
    spatial: list[Dim] = []
    for d in range(2, x.dim()):
        call.block(dims[d], "is convolved")
        call.block(kernel[d], "is a kernel")
        same = call.out.shape[d] == x.shape[d]
        spatial.append(dims[d] if same else call.whole(call.out.shape[d]))
    call.give(call.out, [dims[0], new, *spatial])
