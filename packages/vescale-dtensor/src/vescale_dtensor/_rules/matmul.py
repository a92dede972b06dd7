"""Matrix products and what is built like them.

Letters: b batch, m rows, n columns, k contracted. A cut of k leaves a pending sum; what is added
to the product is then made pending as well, so that it is added once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .pointwise import aligned

aten = torch.ops.aten

# CUDA's grouped product wants rows that begin at multiples of this many bytes.
_GROUPED_ALIGNMENT = 16


def product(left: str, right: str, result: str) -> Callable[[OpCall], Signature]:
    """Return the rule of a product of two tensors over "k", in the notation of einsum."""
    signature = Signature(
        (tuple(left), tuple(right)),
        (tuple(result),),
        reduce={"k": "sum"},
        linear=(frozenset({0}), frozenset({1})),
    )
    return lambda call: signature


def added_product(
    left: str, right: str, result: str, *, contracted: str = "k"
) -> Callable[[OpCall], Signature]:
    """Return the rule of a tensor plus a product; the tensor is broadcast."""

    def rule(call: OpCall) -> Signature:
        return Signature(
            (_broadcast(call, 0, result), tuple(left), tuple(right)),
            (tuple(result),),
            reduce=dict.fromkeys(contracted, "sum"),
            linear=(frozenset({0, 1}), frozenset({0, 2})),
            added=frozenset({0}),
            function=None if contracted == "" else _whole_beta(call),
        )

    return rule


def _whole_beta(call: OpCall) -> Callable[[RankView], Function] | None:
    """Return what makes a rank's own call of an operator on integers, None if it is of others.

    Kernels cut the fraction of ``beta`` off, but refuse one where there is nothing to multiply,
    as on a rank that has nothing of the contracted dim.
    """
    dtype = call.layouts[0].dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    if inexact or type(call.named("beta")) is not float or not call.layouts[1].shape.numel():
        return None

    def add(*tensors: Tensor, beta: float, **named: Any) -> Tensor:
        return call.func(*tensors, beta=int(beta), **named)

    return lambda local: add


def _broadcast(call: OpCall, index: int, result: str) -> Dims:
    """Return the letters of a tensor that is broadcast to the first result."""
    letters = aligned(tuple(call.layouts[index].shape), tuple(call.outputs[0].shape))
    return tuple(None if letter is None else result[letter] for letter in letters)


def _linear(call: OpCall) -> Signature:
    """``linear`` of tensors of any rank; autograd takes it apart before it comes here."""
    leading = tuple(range(len(call.layouts[0].shape) - 1))
    biased = len(call.layouts) == 3
    weight: Dims = ("n", "k") if len(call.layouts[1].shape) == 2 else ("k",)
    bias: tuple[Dims, ...] = (weight[:-1],) if biased else ()
    return Signature(
        ((*leading, "k"), weight, *bias),
        ((*leading, *weight[:-1]),),
        reduce={"k": "sum"},
        linear=(frozenset({0, 2}), frozenset({1, 2}))
        if biased
        else (frozenset({0}), frozenset({1})),
        added=frozenset({2}) if biased else frozenset(),
    )


def _with_activation(call: OpCall) -> Signature:
    """``addmm`` with an activation, which sums that are pending cannot have gone through."""
    return Signature((_broadcast(call, 0, "mn"), ("m", None), (None, "n")), (("m", "n"),))


def _grouped(call: OpCall) -> Signature | None:
    """``_grouped_mm``: groups are rows, columns or matrices; ``offs`` says where they end."""
    if call.named("bias") is not None:
        return None
    left, right = call.layouts[:2]
    forms: dict[tuple[int, int], tuple[Dims, Dims, Dims]] = {
        (2, 3): ((None, "k"), (None, "k", "n"), (None, "n")),
        (3, 2): ((None, "m", "k"), ("k", None), ("m", None)),
        (2, 2): (("m", None), (None, "n"), (None, "m", "n")),
        (3, 3): (("g", "m", "k"), ("g", "k", "n"), ("g", "m", "n")),
    }
    left_dims, right_dims, result = forms[len(left.shape), len(right.shape)]
    whole = _GROUPED_ALIGNMENT // left.dtype.itemsize * call.mesh.size()
    sizes = dict(zip((*left_dims, *right_dims), (*left.shape, *right.shape), strict=True))
    uneven = {letter for letter, size in sizes.items() if letter != "g" and size % whole}
    dims = [
        tuple(None if letter in uneven else letter for letter in each)
        for each in (left_dims, right_dims, result)
    ]
    offsets = tuple((None,) for _ in call.layouts[2:])
    return Signature(
        (dims[0], dims[1], *offsets),
        (dims[2],),
        reduce={"k": "sum"},
        linear=(frozenset({0}), frozenset({1})),
    )


def _distances(call: OpCall) -> Signature:
    """Distances of all rows of one tensor from all rows of another."""
    shape = tuple(call.outputs[0].shape)
    batches = [aligned(tuple(made.shape[:-2]), shape[:-2]) for made in call.layouts]
    batch = tuple(range(len(shape) - 2))
    return Signature(((*batches[0], "m", None), (*batches[1], "n", None)), ((*batch, "m", "n"),))


def _cdist(call: OpCall) -> Signature:
    found = _distances(call)
    # Left open, the way to compute depends on the numbers of rows, which ranks have parts of.
    mode = call.named("compute_mode") or 0
    if mode == 0:
        mode = 1 if max(call.outputs[0].shape[-2:]) > 25 else 2
    return Signature(found.inputs, found.outputs, arguments=lambda local: {"compute_mode": mode})


def _cdist_backward(call: OpCall) -> Signature | None:
    grad, left, right, _ = (made.shape for made in call.layouts)
    batch = tuple(range(len(grad) - 2))
    if not left[:-2] == right[:-2] == grad[:-2]:
        return None
    pairs = (*batch, "m", "n")
    return Signature(
        (pairs, (*batch, "m", "k"), (*batch, "n", "k"), pairs),
        ((*batch, "m", "k"),),
        reduce={"n": "sum"},
        linear=(frozenset({0}),),
    )


def _addmv(call: OpCall) -> Signature:
    found = added_product("mk", "k", "m")(call)
    if call.layouts[0].shape == call.outputs[0].shape:
        return found

    # Without rows, torch returns what is added as it is, scalar or of one element.
    def add(scalar: Tensor, matrix: Tensor, vector: Tensor, **named: Any) -> Tensor:
        return call.func(scalar.expand(matrix.shape[0]), matrix, vector, **named)

    return replace(found, function=lambda local: add)


_mm = product("mk", "kn", "mn")
_bmm = product("bmk", "bkn", "bmn")
_addmm = added_product("mk", "kn", "mn")
_baddbmm = added_product("bmk", "bkn", "bmn")
_addbmm = added_product("bmk", "bkn", "mn", contracted="bk")
_addr = added_product("m", "n", "mn", contracted="")
_dot = product("k", "k", "")

RULES: dict[OpOverload, Any] = {
    aten.mm.default: _mm,
    aten.mm.dtype: _mm,
    aten.bmm.default: _bmm,
    aten.bmm.dtype: _bmm,
    aten.mv.default: product("mk", "k", "m"),
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten.addmm.default: _addmm,
    aten.addmm.dtype: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.baddbmm.dtype: _baddbmm,
    aten.addbmm.default: _addbmm,
    aten.addmv.default: _addmv,
    aten.addr.default: _addr,
    aten.linear.default: _linear,
    aten._addmm_activation.default: _with_activation,
    aten._int_mm.default: _mm,
    aten._grouped_mm.default: _grouped,
    aten._euclidean_dist.default: _distances,
    aten._cdist_forward.default: _cdist,
    aten._cdist_backward.default: _cdist_backward,
}
