"""Pooling, resizing, padding and sampling: every plane of a batch of channels on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import unless_empty, zeros_of
from .dimwise import has_fractions

aten = torch.ops.aten


def planes(core: int, *, linear: bool = False, sized: str = "") -> Callable[[OpCall], Signature]:
    """Return the rule of operators on the last dims of tensors with the same leading dims.

    Args:
        core: How many dims belong to one plane.
        linear: Whether the first argument may be a pending sum, if it has fractions: what is
            between integers is rounded, of a sum otherwise than of its terms.
        sized: The argument that is the shape of the result, leading dims included.
    """

    def rule(call: OpCall) -> Signature:
        return Signature(
            [_leading(len(made.shape), core) for made in call.layouts],
            [_leading(tensor.ndim, core) for tensor in call.outputs],
            linear=(frozenset({0}),) if linear and has_fractions(call) else (),
            arguments=(lambda local: {sized: _own_shape(local)}) if sized else None,
            function=unless_empty(call),
        )

    return rule


def _leading(ndim: int, core: int) -> Dims:
    return (*range(ndim - core), *(None for _ in range(min(core, ndim))))


def _own_shape(local: RankView) -> list[int]:
    return list(local.outputs[0].local_shape(local.coordinate))


def _samples(call: OpCall) -> Signature:
    """Return the signature of operators that mix channels: (N, ...) with N on its own."""
    is_batch = _is_batch(call)
    return Signature(
        [_sample(len(made.shape), is_batch) for made in call.layouts],
        [_sample(tensor.ndim, is_batch) for tensor in call.outputs],
        linear=(frozenset({0}),),
        function=unless_empty(call),
    )


def _is_batch(call: OpCall) -> bool:
    """Whether there is a dim of samples: im2col and col2im take single ones as well."""
    ndim = len(call.layouts[0].shape)
    return ndim > (2 if call.func is aten.col2im.default else 3)


def _sample(ndim: int, is_batch: bool) -> Dims:
    return ("sample", *(None for _ in range(ndim - 1))) if is_batch else (None,) * ndim


def _padded(call: OpCall) -> Signature:
    ndim = len(call.layouts[0].shape)
    pad = call.named("pad")
    # Counted from the last dim, two numbers a dim.
    padded = {ndim - 1 - place // 2 for place, width in enumerate(pad) if width}
    letters = tuple(None if dim in padded else dim for dim in range(ndim))
    is_linear = call.named("value") == 0 and call.layouts[0].dtype != torch.bool
    return Signature(
        (letters,), (letters,), linear=(frozenset({0}),) if is_linear else (),
        function=unless_empty(call),
    )  # fmt: skip


def _grid(call: OpCall) -> Signature:
    samples, places = _grid_letters(call.layouts[0].shape)
    result = (*samples[:2], *places[1:-1])
    return Signature(
        (samples, places), (result,), linear=(frozenset({0}),), function=_unless_any_empty(call)
    )


def _grid_backward(call: OpCall) -> Signature:
    samples, places = _grid_letters(call.layouts[1].shape)
    result = (*samples[:2], *places[1:-1])
    outputs = [
        dims
        for dims, made in zip((samples, places), call.result, strict=True)
        if isinstance(made, Tensor)
    ]
    return Signature(
        (result, samples, places),
        outputs,
        reduce={"channel": "sum", **dict.fromkeys(places[1:-1], "sum")},
        linear=(frozenset({0}),),
        function=_unless_any_empty(call),
    )


def _grid_letters(shape: torch.Size) -> tuple[Dims, Dims]:
    """Return the letters of the input and of the grid of places to sample it at."""
    planes = len(shape) - 2
    places = tuple(f"place {dim}" for dim in range(planes))
    return ("sample", "channel", *(None for _ in places)), ("sample", *places, None)


def _unless_any_empty(call: OpCall) -> Callable[[RankView], Function]:
    def at(local: RankView) -> Function:
        if all(prod(made.local_shape(local.coordinate)) for made in local.inputs):
            return call.func
        return zeros_of(call, local)

    return at


def _overloads(names: Iterable[str]) -> list[OpOverload]:
    """Return the operators of the names that this version of torch has."""
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


_PLAIN: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
        "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "max_unpool2d",
    ),
    3: (
        "max_pool3d_with_indices", "max_pool3d_with_indices_backward",
        "adaptive_max_pool3d", "adaptive_max_pool3d_backward", "max_unpool3d",
    ),
}  # fmt: skip
_SUMS: dict[int, tuple[str, ...]] = {
    1: ("reflection_pad1d", "replication_pad1d", "upsample_nearest1d", "upsample_linear1d",
        "_upsample_nearest_exact1d", "reflection_pad1d_backward", "replication_pad1d_backward"),
    2: ("reflection_pad2d", "replication_pad2d", "upsample_nearest2d", "upsample_bilinear2d",
        "upsample_bicubic2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward", "reflection_pad2d_backward",
        "replication_pad2d_backward"),
    3: ("reflection_pad3d", "replication_pad3d", "upsample_nearest3d", "upsample_trilinear3d",
        "_upsample_nearest_exact3d", "avg_pool3d", "avg_pool3d_backward",
        "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "reflection_pad3d_backward",
        "replication_pad3d_backward", "pixel_shuffle", "pixel_unshuffle"),
}  # fmt: skip
_RESIZED_BACK: dict[int, tuple[str, ...]] = {
    1: ("upsample_nearest1d_backward", "upsample_linear1d_backward",
        "_upsample_nearest_exact1d_backward"),
    2: ("upsample_nearest2d_backward", "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward", "_upsample_nearest_exact2d_backward",
        "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    3: ("upsample_nearest3d_backward", "upsample_trilinear3d_backward",
        "_upsample_nearest_exact3d_backward"),
}  # fmt: skip

RULES: dict[OpOverload, Any] = {
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys(_overloads(("im2col", "col2im", "channel_shuffle")), _samples),
    **dict.fromkeys(_overloads(("grid_sampler_2d", "grid_sampler_3d")), _grid),
    **dict.fromkeys(
        _overloads(("grid_sampler_2d_backward", "grid_sampler_3d_backward")), _grid_backward
    ),
}
for _core in (1, 2, 3):
    RULES.update(dict.fromkeys(_overloads(_PLAIN[_core]), planes(_core)))
    RULES.update(dict.fromkeys(_overloads(_SUMS[_core]), planes(_core, linear=True)))
    RULES.update(dict.fromkeys(
        _overloads(_RESIZED_BACK[_core]), planes(_core, linear=True, sized="input_size")
    ))  # fmt: skip
