"""Which operator has which rule: the one table that all families of rules are collected in."""

from __future__ import annotations

from collections.abc import Callable

from vescale_dtensor._sharding.local_plan import Plan
from vescale_dtensor._sharding.op_call import OpCall, variant
from vescale_dtensor._sharding.signature import Signature
from vescale_dtensor._sharding.view_plan import View
from vescale_dtensor._torch_private import OpOverload

from . import (
    as_strided,
    attention,
    batch_norm,
    cat_stack_repeat,
    conj_neg,
    conv,
    dimwise,
    embedding,
    gather_scatter,
    grad_scaler,
    group_norm,
    index,
    inplace_view,
    item,
    layer_norm,
    linalg,
    loss,
    matmul,
    min_max,
    new_like,
    nll,
    packed_sequence,
    partial_pointwise,
    pointwise,
    pooling_resize,
    random,
    reduce,
    softmax,
    variance,
    vector_norm,
    view,
    view_backward,
)

Rule = Callable[[OpCall], Signature | View | None]

# Where two families list an operator, the later one counts.
_FAMILIES = (
    pointwise,
    view,
    inplace_view,
    conj_neg,
    as_strided,
    vector_norm,
    item,
    grad_scaler,
    dimwise,
    attention,
    batch_norm,
    conv,
    embedding,
    min_max,
    group_norm,
    pooling_resize,
    index,
    cat_stack_repeat,
    linalg,
    loss,
    matmul,
    variance,
    new_like,
    nll,
    packed_sequence,
    layer_norm,
    partial_pointwise,
    random,
    reduce,
    gather_scatter,
    view_backward,
    softmax,
)

_RULES: dict[OpOverload, Rule] = {}
# Operators that are run by functions of ours, whatever the placements.
HANDLERS: dict[OpOverload, Plan] = {}
# Operators that become other operators unless all their inputs are whole.
DECOMPOSED: dict[OpOverload, Plan] = {}
# Operators that write to arguments without saying so in their schemas.
WRITES_UNTOLD = batch_norm.WRITES_UNTOLD
# Operators that no distributed tensor can be given to, and why.
REFUSED = inplace_view.REFUSED

for _family in _FAMILIES:
    _RULES.update(getattr(_family, "RULES", {}))
    HANDLERS.update(getattr(_family, "HANDLERS", {}))
    DECOMPOSED.update(getattr(_family, "DECOMPOSED", {}))
# What writes to its argument has the rule of what does not.
_RULES.update({inplace: rule for func, rule in _RULES.items() if (inplace := variant(func, "_"))})


def rule_of(func: OpOverload) -> Rule | None:
    """Return the rule of an operator, None if it has none."""
    rule = _RULES.get(func)
    if rule is None and pointwise.is_pointwise(func):
        return pointwise.pointwise
    return rule
