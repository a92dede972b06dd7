"""Pointwise operators: element i of the result depends on elements i of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor._sharding.op_call import OpCall, RankView, argument_table
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

aten = torch.ops.aten

# Not tagged pointwise by torch, yet element i of the output depends on element i alone.
ELEMENTWISE: frozenset[OpOverload] = frozenset({
    aten.clone.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten.lift_fresh.default,
    aten.view_as_real_copy.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.isin.Tensor_Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.floor_divide.default, aten.floor_divide_.Tensor, aten.rsub.Tensor,
    aten.complex.default, aten.polar.default,
    aten.hardswish.default, aten.hardswish_.default,
    aten._prelu_kernel.default, aten._prelu_kernel_backward.default,
    # Gradients of activations.
    aten.elu_backward.default, aten.hardshrink_backward.default, aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default, aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default, aten.mish_backward.default,
    aten.rrelu_with_noise_backward.default, aten.softplus_backward.default,
    aten.softshrink_backward.default,
})  # fmt: skip

# Results have the shape of the first argument and do not depend on its values.
_LIKE: frozenset[OpOverload] = frozenset({
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
})  # fmt: skip

# Which arguments may be partial sums together: f(sum of x_r) is the sum of f(x_r).
_LINEAR: dict[OpOverload, tuple[frozenset[int], ...]] = {}


def _linear(*sets: set[int], overloads: tuple[Any, ...]) -> None:
    for overload in overloads:
        _LINEAR[overload] = tuple(map(frozenset, sets))


_linear({0}, overloads=(
    aten.neg.default, aten.neg_.default, aten.clone.default, aten.zero_.default,
    aten.mul.Scalar, aten.mul_.Scalar, aten.div.Scalar, aten.div_.Scalar,
    aten.div.Tensor, aten.div_.Tensor, aten.lift_fresh.default,
))  # fmt: skip
_linear({0}, {1}, overloads=(aten.mul.Tensor,))
_linear({0}, overloads=(aten.mul_.Tensor,))
_linear({0, 1}, overloads=(
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor,
    aten.copy_.default,
))  # fmt: skip
_linear({1, 2}, overloads=(aten.where.self,))


def is_pointwise(func: OpOverload) -> bool:
    """Whether :func:`pointwise` is the rule of an operator."""
    if torch.Tag.nondeterministic_seeded in func.tags or "generator" in argument_table(func):
        return False
    return func in ELEMENTWISE or torch.Tag.pointwise in func.tags


def pointwise(call: OpCall) -> Signature:
    """Return the signature: every dim of the result is a letter, sizes of 1 broadcast."""
    shape = tuple(call.outputs[0].shape) if call.outputs else tuple(call.layouts[0].shape)
    inputs = tuple(aligned(tuple(made.shape), shape) for made in call.layouts)
    outputs = tuple(aligned(tuple(tensor.shape), shape) for tensor in call.outputs)
    return Signature(
        inputs, outputs, linear=_linear_sets(call), arguments=_own_memory_format(call)
    )


def like(call: OpCall) -> Signature:
    """Return the signature of operators that read no more than a shape."""
    letters = tuple(range(len(call.layouts[0].shape)))
    return Signature((letters,), (letters,), reads=False, arguments=_own_memory_format(call))


def _own_memory_format(call: OpCall) -> Callable[[RankView], dict[str, Any]] | None:
    """Return the format of a rank's part: one of which dims were flattened has no channels."""
    if call.named("memory_format") not in (torch.channels_last, torch.channels_last_3d):
        return None

    def arguments(local: RankView) -> dict[str, Any]:
        made = local.inputs[0]
        if len(made.local_shape(local.coordinate)) == len(made.shape):
            return {}
        return {"memory_format": torch.contiguous_format}

    return arguments


def aligned(shape: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """Return the letters of a shape that is broadcast to ``result``; letters are its dims."""
    skipped = len(result) - len(shape)
    return tuple(
        skipped + dim if size == result[skipped + dim] else None for dim, size in enumerate(shape)
    )


def _linear_sets(call: OpCall) -> tuple[frozenset[int], ...]:
    if call.func is aten._to_copy.default:
        before, after = call.layouts[0].dtype, call.outputs[0].dtype
        exact = before == after or (before.is_floating_point and after.is_floating_point)
        return (frozenset({0}),) if exact and after.itemsize >= before.itemsize else ()
    sets = _LINEAR.get(call.func, ())
    if any(not (made.dtype.is_floating_point or made.dtype.is_complex) for made in call.layouts):
        return ()
    return tuple(each for each in sets if max(each) < len(call.layouts))


RULES = dict.fromkeys(_LIKE, like)
