"""Which operator has which rule: the one table that all families of rules are collected in."""

from __future__ import annotations

from collections.abc import Callable

from vescale_dtensor._calls import Call
from vescale_dtensor._inplace_view import (
    HANDLERS as INPLACE_VIEWS,
    REFUSED as REFUSED_INPLACE_VIEWS,
)
from vescale_dtensor._lazy_bits import HANDLERS as LAZY_BITS
from vescale_dtensor._plan import Plan
from vescale_dtensor._signature import Signature
from vescale_dtensor._torch_private import OpOverload
from vescale_dtensor._views import View

from . import (
    _along,
    _attention,
    _batch_norm,
    _conv,
    _embedding,
    _extreme,
    _group_norm,
    _image,
    _index,
    _join,
    _linalg,
    _loss,
    _matmul,
    _moments,
    _new,
    _nll,
    _normalize,
    _norms,
    _pending,
    _pointwise,
    _random,
    _reduce,
    _scatter,
    _scattered,
    _softmax,
    _values,
    _view,
)

Rule = Callable[[Call], Signature | View | None]

_FAMILIES = (
    _along,
    _attention,
    _batch_norm,
    _conv,
    _embedding,
    _extreme,
    _group_norm,
    _image,
    _index,
    _join,
    _linalg,
    _loss,
    _matmul,
    _moments,
    _new,
    _nll,
    _normalize,
    _pending,
    _random,
    _reduce,
    _scatter,
    _scattered,
    _softmax,
)

_RULES: dict[OpOverload, Rule] = {**_pointwise.RULES, **_view.RULES}
# Operators that are run by functions of ours, whatever the placements.
HANDLERS: dict[OpOverload, Plan] = {
    **INPLACE_VIEWS,
    **LAZY_BITS,
    **_norms.HANDLERS,
    **_values.HANDLERS,
}
# Operators that become other operators unless all their inputs are whole.
DECOMPOSED: dict[OpOverload, Plan] = {}
# Operators that no distributed tensor can be given to, and why.
REFUSED: dict[OpOverload, str] = dict(REFUSED_INPLACE_VIEWS)

for _family in _FAMILIES:
    _RULES.update(_family.RULES)
    HANDLERS.update(_family.HANDLERS)
    DECOMPOSED.update(_family.DECOMPOSED)


def rule_of(func: OpOverload) -> Rule | None:
    """Return the rule of an operator, None if it has none."""
    rule = _RULES.get(func)
    if rule is None and _pointwise.is_pointwise(func):
        return _pointwise.pointwise
    return rule
