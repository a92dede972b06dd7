"""Operators that make one element of many, or each of all."""

from __future__ import annotations

import torch

from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

from .pointwise import pointwise

rule = Rules()


def reduced(call: OpCall, source: torch.Tensor) -> list[int]:
    """Return the dimensions that a reduction takes, by any of the names they have."""
    dims = call.args.get("dim")
    if dims is None or dims == []:
        return list(range(source.dim()))
    dims = [dims] if isinstance(dims, int) else list(dims)
    return [d % source.dim() for d in dims] if source.dim() else []


def shrink(call: OpCall, source: torch.Tensor, taken: list[int]) -> None:
    dims = call.dims(source)
    for out in call.outputs:
        if out.dim() == source.dim():
            call.give(out, [() if d in taken else dim for d, dim in enumerate(dims)])
        else:
            call.give(out, [dim for d, dim in enumerate(dims) if d not in taken])


@rule("sum", "mean", "nansum", linear="first")
def total(call: OpCall) -> None:
    source = call.args["self"]
    taken = reduced(call, source)
    for d in taken:
        call.contract(call.dims(source)[d])
    shrink(call, source, taken)


@rule("amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "argmax", "argmin",
      "any", "all", "prod", "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian",
      "count_nonzero", "mode", "aminmax")  # fmt: skip
def reduce(call: OpCall) -> None:
    source = call.args.get("self", call.inputs[0])
    taken = reduced(call, source)
    if len(call.inputs) > 1 and call.out.shape == torch.broadcast_shapes(
        *(t.shape for t in call.inputs)
    ):  # max(x, y)
        pointwise(call)
        return
    for d in taken:
        call.block(call.dims(source)[d])
    shrink(call, source, taken)


@rule("softmax", "log_softmax", "safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort",
      "argsort", "cummax", "cummin", "cumulative_trapezoid")  # fmt: skip
def along(call: OpCall) -> None:
    source = call.args["self"]
    dims = call.dims(source)
    if dims:
        call.block(dims[call.args.get("dim", -1)])
    for out in call.outputs:
        call.give(out, dims)


@rule("fft_r2c", "fft_c2r", "fft_c2c")
def transform(call: OpCall) -> None:
    source = call.args["self"]
    dims = list(call.dims(source))
    for d in call.args["dim"]:
        call.block(dims[d])
        if call.out.shape[d] != source.shape[d]:
            dims[d] = call.whole(call.out.shape[d])
    call.give(call.out, dims)


@rule("topk", "kthvalue")
def topk(call: OpCall) -> None:
    source = call.args["self"]
    dims = list(call.dims(source))
    at = call.args["dim"] % source.dim()
    call.block(dims[at])
    for out in call.outputs:
        if out.dim() == source.dim():
            call.give(out, [*dims[:at], call.whole(out.shape[at]), *dims[at + 1 :]])


@rule("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss", "smooth_l1_loss",
      "huber_loss", "binary_cross_entropy", "histc", "bincount",
      "kl_div", "multi_margin_loss", "nonzero", "unique2", "unique_consecutive",
      "unique_dim", "masked_select", "ctc_loss", "equal", "triu_indices", "cdist_forward",
      "pdist_forward", "linalg_inv_ex", "local_scalar_dense",
      "nonzero_static")  # fmt: skip
def everything(call: OpCall) -> None:
    """The result depends on every element: all dimensions are needed whole."""
    call.block_all(call.inputs)
