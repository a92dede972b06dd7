"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_parallel._trace.axes.algebra import Dim
from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


def pointwise(call: OpCall) -> None:
    dims = broadcast(call, call.inputs, call.out)
    for out in call.outputs:
        if out.shape == call.out.shape:
            call.give(out, dims)


def broadcast(call: OpCall, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> list[Dim]:
    """Unify dimensions that broadcasting aligns and return the result's."""
    made: list[Dim | None] = [None] * out.dim()
    for tensor in tensors:
        offset = out.dim() - tensor.dim()
        for d, dim in enumerate(call.dims(tensor)):
            at = offset + d
            if at < 0 or tensor.shape[d] != out.shape[at]:
                continue
            known = made[at]
            if known is None:
                made[at] = dim
            else:
                call.unify(known, dim)
    return [call.fresh(n) if dim is None else dim for dim, n in zip(made, out.shape, strict=True)]


@rule("neg", "clone", "to_copy", "alias", "detach", "lift_fresh", "lift_fresh_copy",
      "contiguous", "real", "imag", "conj", "resolve_conj", "conj_physical", "resolve_neg",
      "to", "type_as", "masked_fill", "div", "positive",
      linear="first")  # fmt: skip
def linear_in_first(call: OpCall) -> None:
    pointwise(call)


@rule("add", "sub", "rsub", "where", "add_scalar", "lerp", linear="jointly")
def linear_jointly(call: OpCall) -> None:
    pointwise(call)


@rule("copy", linear="last")
def copy(call: OpCall) -> None:
    pointwise(call)


@rule("mul", linear="each")
def linear_in_each(call: OpCall) -> None:
    pointwise(call)


@rule("polar", "complex", "bernoulli", "native_dropout", "fused_dropout", "clamp",
      "fill", "zero", "normal", "uniform", "exponential", "isin",
      "pow", "celu", "prelu", "softplus", "hardtanh", "nan_to_num", "special_entr",
      "log_normal", "geometric", "cauchy", "random", "bucketize", "searchsorted_scalar",
      "relu", "leaky_relu", "prelu_kernel", "hardswish", "silu", "gelu", "mish", "view_dtype",
      "squeeze_copy", "rrelu", "rrelu_with_noise", "erfinv", "log_sigmoid_forward", "threshold",
      "floor_divide", "efficientzerotensor", "angle",
      "fake_quantize_per_tensor_affine")  # fmt: skip
def anything_else(call: OpCall) -> None:
    pointwise(call)


@rule("glu")
def glu(call: OpCall) -> None:
    source = call.args["self"]
    at = call.args["dim"] % source.dim()
    dims = list(call.dims(source))
    half = source.shape[at] // 2
    parts = [call.axes.slice(dims[at], start, half) for start in (0, half)]
    if parts[0] is None or parts[1] is None:
        call.block(dims[at])
        dims[at] = call.whole(half)
    else:
        call.unify(parts[0], parts[1])
        dims[at] = parts[0]
    call.give(call.out, dims)


@rule("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
      "randint_like")  # fmt: skip
def like(call: OpCall) -> None:
    call.give(call.out, call.dims(call.args["self"]))


@rule("empty", "zeros", "ones", "full", "scalar_tensor", "new_empty", "new_zeros", "new_ones",
      "new_full", "empty_strided", "new_empty_strided", "empty_permuted")  # fmt: skip
def uniform(call: OpCall) -> None:
    call.give(call.out, [call.fresh(n) for n in call.out.shape])
