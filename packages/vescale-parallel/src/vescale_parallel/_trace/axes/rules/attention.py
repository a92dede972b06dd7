"""The kernels of scaled dot product attention."""

from __future__ import annotations

from vescale_parallel._trace.axes.graph import OpCall
from vescale_parallel._trace.axes.registry import Rules

rule = Rules()


@rule("scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_flash_attention",
      "scaled_dot_product_efficient_attention", "scaled_dot_product_cudnn_attention",
      "scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
      "scaled_dot_product_attention_math_for_mps")  # fmt: skip
def attention(call: OpCall) -> None:
    query, key, value = (call.args[name] for name in ("query", "key", "value"))
    q, k, v = call.dims(query), call.dims(key), call.dims(value)
    for d in range(query.dim() - 3):
        call.unify(q[d], k[d])
        call.unify(q[d], v[d])
    call.unify(k[-3], v[-3])
    # Grouped heads: each key head serves consecutive query heads.
    group = call.fresh(query.shape[-3] // key.shape[-3])
    call.unify(q[-3], (*k[-3], *group))
    call.unify(k[-2], v[-2])
    call.unify(q[-1], k[-1])
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    if mask is not None:
        scores = (*q[:-1], k[-2])
        for one, other in zip(reversed(scores), reversed(call.dims(mask)), strict=False):
            if other:
                call.unify(one, other)
    call.block(k[-2], "is attended over")
    call.block(q[-1], "is contracted between activations")
    for out in call.outputs:
        if out.dim() == query.dim() and out is call.out:
            call.give(out, [*q[:-1], v[-1]])
        elif out.shape == query.shape[:-1]:
            call.give(out, q[:-1])
