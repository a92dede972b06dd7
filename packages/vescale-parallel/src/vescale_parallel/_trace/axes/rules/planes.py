"""Operators that compute each channel's line, plane or volume from its own and no other's."""

from __future__ import annotations

import re

from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


@rule("avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
      "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d",
      "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
      "upsample_bilinear2d_aa", "upsample_bicubic2d_aa",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
      "upsample_nearest_exact1d", "upsample_nearest_exact2d", "upsample_nearest_exact3d",
      linear="first")  # fmt: skip
def weighted_sums(call: OpCall) -> None:
    each_by_itself(call)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
      "adaptive_max_pool3d")  # fmt: skip
def largest(call: OpCall) -> None:
    each_by_itself(call)


def each_by_itself(call: OpCall) -> None:
    """Pass on all dimensions but those in space, whose number the operator's name has."""
    x = call.inputs[0]
    found = re.search(r"(\d)d", call.name)
    assert found is not None
    at = x.dim() - int(found[1])
    dims = call.dims(x)
    for dim in dims[at:]:
        call.block(dim)
    for out in call.outputs:
        call.give(out, [*dims[:at], *(call.whole(n) for n in out.shape[at:])])


@rule("im2col", linear="first")
def unfold(call: OpCall) -> None:
    x, out = call.args["self"], call.out
    *outer, channel, height, width = call.dims(x)
    for dim in (height, width):
        call.block(dim)
    kernel = call.whole(out.shape[-2] // x.shape[-3])
    call.give(out, [*outer, (*channel, *kernel), call.whole(out.shape[-1])])


@rule("col2im", linear="first")
def fold(call: OpCall) -> None:
    x, out = call.args["self"], call.out
    *outer, columns, places = call.dims(x)
    call.block(places)
    channels = out.shape[-3]
    parts = call.axes.regroup([columns], [channels, x.shape[-2] // channels])
    if parts is None:
        call.block(columns)
        channel = call.whole(channels)
    else:
        channel, kernel = parts
        call.block(kernel)
    call.give(out, [*outer, channel, *(call.whole(n) for n in out.shape[-2:])])


@rule("grid_sampler_2d", "grid_sampler_3d", linear="first")
def sample(call: OpCall) -> None:
    x, grid = call.args["input"], call.args["grid"]
    dims, points = call.dims(x), call.dims(grid)
    call.unify(dims[0], points[0])
    for dim in (*dims[2:], *points[1:]):
        call.block(dim)
    call.give(call.out, [*dims[:2], *(call.whole(n) for n in call.out.shape[2:])])
