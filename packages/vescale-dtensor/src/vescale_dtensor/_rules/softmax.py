"""Softmax and its logarithm; see [Note: decompositions] for a dim that is cut."""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import as_distributed, is_cut, settled, widened
from .dimwise import along

aten = torch.ops.aten


def _along_whole(call: OpCall) -> Signature | None:
    # Backward: the result of the forward, which follows the gradient.
    made = call.layouts[-1]
    dim = call.named("dim") % max(len(made.shape), 1)
    return None if is_cut(made, (dim,)) else along(call, (dim,))


def _decomposed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    given = as_distributed(call, "self")
    # Not call.outputs: this runs at every call, and torch takes milliseconds without data.
    dtype = torch.float32 if call.named("half_to_float") else given.dtype
    values, dims = widened(given), [call.named("dim")]
    largest = settled(aten.amax.default(values, dims, True))
    shifted = values - largest
    del values  # each is as large as logits, and no more of them are there at once than must be
    exponentials = shifted.exp()
    total = settled(aten.sum.dim_IntList(exponentials, dims, True))
    if func is aten._softmax.default:
        del shifted
        return (exponentials / total).to(dtype)
    del exponentials
    return (shifted - total.log()).to(dtype)


def _decomposed_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = OpCall(func, args, kwargs)
    grad, output = as_distributed(call, "grad_output"), as_distributed(call, "output")
    grad, output, dims = widened(grad), widened(output), [call.named("dim")]
    if func is aten._softmax_backward_data.default:
        weighted = grad * output
        total = settled(aten.sum.dim_IntList(weighted, dims, True))
        result = weighted - output * total
    else:
        total = settled(aten.sum.dim_IntList(grad, dims, True))
        result = grad - output.exp() * total
    return result.to(call.named("input_dtype"))


RULES: dict[OpOverload, Any] = {
    aten._softmax.default: _along_whole,
    aten._log_softmax.default: _along_whole,
    aten._softmax_backward_data.default: _along_whole,
    aten._log_softmax_backward_data.default: _along_whole,
}
DECOMPOSED: dict[OpOverload, Any] = {
    aten._softmax.default: _decomposed,
    aten._log_softmax.default: _decomposed,
    aten._softmax_backward_data.default: _decomposed_backward,
    aten._log_softmax_backward_data.default: _decomposed_backward,
}
