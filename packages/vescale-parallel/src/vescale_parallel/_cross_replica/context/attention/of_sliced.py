"""Attention that is called with sliced tensors, whose code sees whole sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        given = [named[name] for name in ARGUMENTS[:3]]
        if not any(map(is_sliced, given)):
            return self._attention.scaled_dot_product(*args, **kwargs)
        along = _along(given[0])
        if along is None:
            return F.scaled_dot_product_attention(**gathered(named))
        if (mine := self._of_stack(given, along)) is not None:
            attended = dict(zip(ARGUMENTS, mine, strict=False))
            made = self._attention.of_own({**gathered(named | attended)})
        else:
            whole = gathered({name: x for name, x in named.items() if name != "query"})
            made = self._attention.to_whole({**whole, "query": given[0].local}, along.slices)
        return SlicedTensor.of(made, along.at(made.ndim + _POSITIONS))

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for a function of transformers' attention interface."""
        module, given, others = args[0], args[1:4], gathered(args[4:])
        if not any(map(is_sliced, given)):
            return self._attention.of_interface(function, name, *args, **kwargs)
        along, named = _along(given[0]), gathered(kwargs)
        if along is None or not along.slices.is_like(self._attention.slices):
            return function(module, *gathered(given), *others, **named)
        if (mine := self._of_stack(given, along)) is not None:
            attend = functools.partial(self._attention.interface_of_own, function, name)
        else:
            mine = given[0].local, *gathered(given[1:])
            attend = functools.partial(self._attention.interface_to_whole, function)
        made, weights = attend(module, *mine, *others, **named)
        return SlicedTensor.of(made, along.at(1)), weights

    def _of_stack(self, given: Sequence[Tensor], along: Along) -> list[Tensor] | None:
        """Return queries, keys and values as slices of the sequence of the stack that runs.

        None if they are not: where keys and values are of another sequence that is whole, or of
        one that is joined with another. Keys that were gathered are cut again, if values are
        slices of the sequence that they are of.
        """
        own = self._attention.slices
        if not along.slices.is_like(own) or not any(map(is_sliced, given[1:])):
            return None
        query, *others = given
        if any(_length(x) != own.length for x in others):
            return None
        return [query.local, *(_slice(x, along) for x in others)]


def _along(query: Tensor) -> Along | None:
    """Return which positions queries are slices of; None if they are none."""
    found = query.along if isinstance(query, SlicedTensor) else None
    if found is None or found.dim != query.ndim + _POSITIONS or found.count > 1:
        return None
    return found


def _length(x: Tensor) -> int:
    return x.along.length if isinstance(x, SlicedTensor) else x.shape[_POSITIONS]


def _slice(x: Tensor, along: Along) -> Tensor:
    dim = x.ndim + _POSITIONS
    if isinstance(x, SlicedTensor) and x.along.is_like(along) and x.along.dim == dim:
        return x.local
    return along.part(gathered(x), dim)
