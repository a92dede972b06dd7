"""Embedding: rows of a table. A table that is cut in rows is looked up in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.op_call import Function, OpCall
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._torch_private import OpOverload

from .sharded_lookup import Part, masked, when_cut

aten = torch.ops.aten


def _embedding(call: OpCall) -> Signature | None:
    if call.named("sparse"):
        return None
    ids = tuple(range(len(call.layouts[1].shape)))

    def of_part(part: Part) -> Function:
        def embed(weight: Tensor, index: Tensor, *options: Any, **named: Any) -> Tensor:
            return masked(0, aten.embedding.default, part, weight, index)

        return embed

    return Signature(
        (("rows", "columns"), ids),
        ((*ids, "columns"),),
        reduce={"rows": "sum"},
        linear=(frozenset({0}),),
        function=when_cut(call.func, 0, of_part),
    )


def _embedding_dense_backward(call: OpCall) -> Signature:
    ids: tuple[Any, ...] = tuple(range(len(call.layouts[1].shape)))
    if call.named("scale_grad_by_freq"):
        ids = (None,) * len(ids)  # how often an id occurs is counted over all of them
    return Signature(
        ((*ids, "columns"), ids),
        ((None, "columns"),),
        reduce={dim: "sum" for dim in ids if dim is not None},
        linear=(frozenset({0}),),
    )


RULES: dict[OpOverload, Any] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_dense_backward,
}
