"""Scaled dot product attention, by the kernels that torch chooses among.

Batches and heads are independent of each other; positions are not, so the sequence is whole.
Tensors that are cut along the sequence are cut along heads instead, if they divide evenly. With
fewer heads of keys than of queries, a rank needs the keys of its queries: they are cut alike if
they divide evenly, else keys are whole and every rank takes what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import is_sharded, single_dim
from vescale_dtensor._sharding.op_call import Function, OpCall, RankView
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._torch_private import OpOverload

from .decompositions import zeros_of
from .dimwise import along_named
from .pointwise import aligned
from .sharded_lookup import part_of_dim

aten = torch.ops.aten

_BATCH, _HEADS = "batch", "heads"
# Arguments by the dims that they have; all others are small and the same on every rank.
_LIKE_QUERIES = frozenset({"query", "grad_out", "grad_out_", "out"})
_LIKE_KEYS = frozenset({"key", "value"})
_STATISTICS = frozenset({"logsumexp"})
_MASKS = frozenset({"attn_mask", "attn_bias"})


# Elements between rows of a bias that the memory efficient kernels were written for.
_ROW_ALIGNMENT = 16
_ALIGNED = frozenset({
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
})  # fmt: skip


def _forward(call: OpCall) -> Signature | None:
    if _is_unusual(call):
        return None
    inputs = _input_letters(call)
    # What follows the values and their statistics are seeds and, for nested tensors, lengths.
    outputs = [_heads(tensor.ndim) if i < 2 else None for i, tensor in enumerate(call.outputs)]
    return _signature(call, inputs, outputs)


def _backward(call: OpCall) -> Signature | None:
    if _is_unusual(call):
        return None
    inputs = _input_letters(call)
    outputs = [_heads(4), _key_heads(call), _key_heads(call)]
    if len(call.outputs) > 3:
        # The gradient of a mask that was broadcast is summed over what shared it.
        outputs.append(_mask_letters(call, call.outputs[3].shape))
    every = set(outputs[0]).intersection(*outputs)
    reduce = {letter: "sum" for letter in (_BATCH, _HEADS) if letter not in every}
    return _signature(call, inputs, outputs, reduce)


def _signature(
    call: OpCall,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims | None],
    reduce: Mapping[str, str] | None = None,
) -> Signature:
    return Signature(
        inputs,
        outputs,
        reduce=reduce or {},
        function=_own_function(call),
        accepts=_accepts(call),
    )


def _is_unusual(call: OpCall) -> bool:
    """Whether ranks would have to share random numbers, or the shapes are not (b, h, s, d)."""
    if call.named("dropout_p", 0.0) or call.named("return_debug_mask"):
        return True
    names = ("query", "key", "value")
    shapes = [call.named(name).shape for name in names]
    return any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes)


def _input_letters(call: OpCall) -> list[Dims]:
    """Return the letters of every tensor argument, found by its name in the schema."""
    letters: list[Dims] = []
    for argument in call.func._schema.arguments:
        tensor = call.named(argument.name)
        if not isinstance(tensor, Tensor):
            continue
        if argument.name in _LIKE_QUERIES or argument.name in _STATISTICS:
            letters.append(_heads(tensor.ndim))
        elif argument.name in _LIKE_KEYS:
            letters.append(_key_heads(call))
        elif argument.name in _MASKS:
            letters.append(_mask_letters(call, tensor.shape))
        else:
            letters.append((None,) * tensor.ndim)
    return letters


def _heads(ndim: int) -> Dims:
    return (_BATCH, _HEADS, *(None,) * (ndim - 2))


def _key_heads(call: OpCall) -> Dims:
    """Return the letters of keys: with heads of their own that do not divide, these are whole."""
    spread = _is_grouped(call) and not _divides(call)
    return (_BATCH, None, None, None) if spread else _heads(4)


def _mask_letters(call: OpCall, shape: Sequence[int]) -> Dims:
    query, key = call.named("query").shape, call.named("key").shape
    names = (_BATCH, _HEADS, None, None)
    letters = aligned(tuple(shape), (query[0], query[1], query[2], key[2]))
    return tuple(None if letter is None else names[letter] for letter in letters)


def _is_grouped(call: OpCall) -> bool:
    return len({call.named(name).shape[1] for name in ("query", "key", "value")}) > 1


def _divides(call: OpCall) -> bool:
    """Whether every rank has all keys of its queries when keys are cut as queries are."""
    made = [call.layouts[call.tensor_index(name) or 0] for name in ("query", "key", "value")]
    axes = {
        axis
        for each in made
        for axis, p in enumerate(each.placements)
        if is_sharded(p) and single_dim(p) in (1, None)
    }
    cuts = [each.placements[axis] for each in made for axis in axes]
    num_parts = math.prod(call.mesh.size(axis) for axis in axes)
    plain = all(type(p) is Shard for p in cuts if is_sharded(p) and single_dim(p) in (1, None))
    return plain and all(each.shape[1] % num_parts == 0 for each in made)


def _accepts(call: OpCall) -> Callable[[Sequence[Layout]], bool] | None:
    """Return what refuses cuts under which queries and their keys would be on different ranks."""
    if not _is_grouped(call) or not _divides(call):
        return None
    index = call.tensor_index("key") or 0

    def accepts(inputs: Sequence[Layout]) -> bool:
        made = inputs[index]
        cuts = [
            (p, made.mesh.size(axis)) for axis, p in enumerate(made.placements) if _on_heads(p)
        ]
        num_parts = math.prod(size for _, size in cuts)
        return all(type(p) is Shard for p, _ in cuts) and made.shape[1] % num_parts == 0

    return accepts


def _on_heads(placement: Placement) -> bool:
    return is_sharded(placement) and single_dim(placement) == 1


def _own_function(call: OpCall) -> Callable[[RankView], Function]:
    """Return a rank's own call: no kernel without heads, and keys for the heads it has."""
    index = call.tensor_index("query") or 0
    num_groups = call.named("key").shape[1]
    shares = num_groups and call.named("query").shape[1] // num_groups
    spread = _is_grouped(call) and not _divides(call)

    def function(local: RankView) -> Function:
        if not math.prod(local.inputs[index].local_shape(local.coordinate)):
            return zeros_of(call, local)  # of keys that no query of the rank had a part in
        run = _with_aligned_bias(call) if call.func in _ALIGNED else call.func
        part = part_of_dim(local, 1, index=index)
        if part is None or not spread:
            return run
        heads = [head for start, stop, _ in part.runs for head in range(start, stop)]
        return _with_own_keys(call, run, [head // shares for head in heads])

    return function


def _with_aligned_bias(call: OpCall) -> Function:
    place = [argument.name for argument in call.func._schema.arguments].index("attn_bias")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args]
        if isinstance(given[place], Tensor):
            given[place] = aligned_rows(given[place])
        return call.func(*given, **kwargs)

    return run


def aligned_rows(bias: Tensor) -> Tensor:
    """Return ``bias`` with rows that begin where the kernels want them, a copy if need be.

    torch pads the bias to that end, but a rank's part of it is a copy without the padding.
    """
    if all(stride % _ROW_ALIGNMENT == 0 for stride in bias.stride()[:-1]):
        return bias
    *outer, length = bias.shape
    padded = -(-length // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return bias.new_empty((*outer, padded))[..., :length].copy_(bias)


def _with_own_keys(call: OpCall, kernel: Function, groups: Sequence[int]) -> Function:
    """Return a call that gives every query head the one of all key heads that it belongs to."""
    names = [argument.name for argument in call.func._schema.arguments]
    places = [names.index("key"), names.index("value")]
    is_backward = "grad_out" in names or "grad_out_" in names

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args]
        index = torch.tensor(groups, device=given[places[0]].device)
        for place in places:
            given[place] = args[place].index_select(1, index)
        results = kernel(*given, **kwargs)
        if not is_backward:
            return results
        grads = [
            args[place].new_zeros(args[place].shape).index_add_(1, index, grad)
            for place, grad in zip(places, results[1:3], strict=True)
        ]
        return (results[0], *grads, *results[3:])

    return run


_FORWARD = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

# Rows that a mask hides altogether give zeros.
RULES: dict[OpOverload, Any] = {aten._safe_softmax.default: along_named("dim")}
for _name in _FORWARD:
    RULES[getattr(aten, _name).default] = _forward
    RULES[getattr(aten, f"{_name}_backward").default] = _backward
