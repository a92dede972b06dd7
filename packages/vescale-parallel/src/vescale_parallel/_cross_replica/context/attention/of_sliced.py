"""Attention that is called with sliced tensors, whose code sees whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._cross_replica.context.sliced.tensor import (
    Along,
    SlicedTensor,
    gathered,
    is_sliced,
)

from .cross import AttendsAcross
from .heads import ARGUMENTS

_POSITIONS = -2  # of queries, keys and values (batch, heads, positions, features)


class AttendsSliced:
    """Has sliced tensors be attended with as slices are, and everything else as it was.

    Args:
        attention: Of slices.
    """

    def __init__(self, attention: AttendsAcross) -> None:
        self._attention = attention

    def wants(self) -> bool:
        """Whether attention that is called now is to be computed here."""
        return self._attention.wants()

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stand for ``F.scaled_dot_product_attention``."""
        named = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        given = [named.pop(name) for name in ARGUMENTS[:3]]
        if not any(map(is_sliced, given)):
            return self._attention.scaled_dot_product(*args, **kwargs)
        along = _along(*given)
        if along is None:
            return F.scaled_dot_product_attention(*gathered(given), **gathered(named))
        slices, named = dict(zip(ARGUMENTS, _slices(given, along), strict=False)), gathered(named)
        is_whole = not any(map(is_sliced, given[1:]))
        attend = self._attention.to_whole if is_whole else self._attention.of_own
        made = attend({**slices, **named})
        return SlicedTensor.of(made, along.at(made.ndim + _POSITIONS))

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for a function of transformers' attention interface."""
        module, given, others = args[0], args[1:4], args[4:]
        if not any(map(is_sliced, given)):
            return self._attention.of_interface(function, name, *args, **kwargs)
        along, named = _along(*given), gathered(kwargs)
        if along is None:
            return function(module, *gathered((*given, *others)), **named)
        args = module, *_slices(given, along), *gathered(others)
        if not any(map(is_sliced, given[1:])):
            made, weights = self._attention.interface_to_whole(function, *args, **named)
        else:
            made, weights = self._attention.interface_of_own(function, name, *args, **named)
        return SlicedTensor.of(made, along.at(1)), weights


def _along(query: Tensor, key: Tensor, value: Tensor) -> Along | None:
    """Return which positions queries are slices of; None if they are none."""
    found = query.along if isinstance(query, SlicedTensor) else None
    if found is None or found.dim != query.ndim + _POSITIONS or found.count > 1:
        return None
    return found


def _slices(given: Any, along: Along) -> Any:
    """Return queries, keys and values of this rank: slices of its sequence, others whole.

    Keys that were gathered are cut again, if values are slices of the sequence that they are of.
    """
    query, *others = given
    is_own = any(map(is_sliced, others))
    return [query.local, *(_slice(x, along) if is_own else x for x in others)]


def _slice(x: Tensor, along: Along) -> Tensor:
    dim = x.ndim + _POSITIONS
    if isinstance(x, SlicedTensor) and x.along.is_like(along) and x.along.dim == dim:
        return x.local
    return along.part(gathered(x), dim)
