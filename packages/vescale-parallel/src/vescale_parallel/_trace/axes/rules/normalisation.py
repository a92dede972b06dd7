"""Normalisations that torch has as one operator."""

from __future__ import annotations

from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


@rule("native_layer_norm", "fused_rms_norm", "layer_norm", "rms_norm")
def layer_norm(call: OpCall) -> None:
    x = call.args["input"]
    dims, width = call.dims(x), len(call.args["normalized_shape"])
    for name in ("weight", "bias"):
        affine = call.args.get(name)
        if affine is not None:
            for one, other in zip(dims[-width:], call.dims(affine), strict=True):
                call.unify(one, other)
    for dim in dims[-width:]:
        call.block(dim)
    for out in call.outputs:
        kept = out.shape == x.shape
        call.give(out, dims if kept else [*dims[:-width], *[()] * (out.dim() - x.dim() + width)])


@rule("native_group_norm")
def group_norm(call: OpCall) -> None:
    x = call.args["input"]
    dims = call.dims(x)
    for dim in dims[1:]:
        call.block(dim)
    for name in ("weight", "bias"):
        if call.args[name] is not None:
            call.unify(dims[1], call.dims(call.args[name])[0])
    call.give(call.out, dims)


@rule("native_batch_norm", "native_batch_norm_legit", "native_batch_norm_legit_no_training",
      "native_batch_norm_legit_functional", "cudnn_batch_norm", "batch_norm_with_update",
      "batch_norm_no_update", "native_batch_norm_legit.no_stats")  # fmt: skip
def batch_norm(call: OpCall) -> None:
    x = call.args["input"]
    dims = call.dims(x)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.args.get(name) is not None:
            call.unify(dims[1], call.dims(call.args[name])[0])
    for d in (0, *range(2, x.dim())):
        call.block(dims[d])
    for out in call.outputs:
        call.give(out, dims if out.shape == x.shape else [call.whole(n) for n in out.shape])


@rule("weight_norm_interface")
def weight_norm(call: OpCall) -> None:
    """Scale each slice along a dim, the first or the last, to a length."""
    direction, length, kept = call.args["v"], call.args["g"], call.args["dim"]
    dims = call.dims(direction)
    call.unify(dims[kept], call.dims(length)[kept])
    for dim in (*dims[:kept], *dims[kept + 1 :]):
        call.block(dim)
    for out in call.outputs:
        of_norms = [dims[d] if d == kept else () for d in range(out.dim())]
        call.give(out, dims if out.shape == direction.shape else of_norms)
