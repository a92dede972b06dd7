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
        query = _sliced_query(given[0])
        if query is None:
            return F.scaled_dot_product_attention(**gathered(named))
        if (mine := self._of_stack(query, given[1:])) is not None:
            attended = dict(zip(ARGUMENTS, mine, strict=False))
            made = self._attention.of_own(gathered(named | attended))
        else:
            whole = gathered({name: x for name, x in named.items() if name != "query"})
            made = self._attention.to_whole({**whole, "query": query.local}, query.along.slices)
        return SlicedTensor.of(made, query.along.at(made.ndim + _POSITIONS))

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for a function of transformers' attention interface."""
        module, given, others = args[0], args[1:4], gathered(args[4:])
        if not any(map(is_sliced, given)):
            return self._attention.of_interface(function, name, *args, **kwargs)
        query, named = _sliced_query(given[0]), gathered(kwargs)
        if query is None or not query.along.slices.is_like(self._attention.slices):
            return function(module, *gathered(given), *others, **named)
        if (mine := self._of_stack(query, given[1:])) is not None:
            attend = functools.partial(self._attention.interface_of_own, function, name)
        else:
            mine = query.local, *gathered(given[1:])
            attend = functools.partial(self._attention.interface_to_whole, function)
        made, weights = attend(module, *mine, *others, **named)
        return SlicedTensor.of(made, query.along.at(1)), weights

    def _of_stack(self, query: SlicedTensor, others: Sequence[Tensor]) -> list[Tensor] | None:
        """Return queries, keys and values as slices of the sequence of the stack that runs.

        None if they are not: where keys and values are of another sequence that is whole, or of
        one that is joined with another. Keys that were gathered are cut again, if values are
        slices of the sequence that they are of.
        """
        own, along = self._attention.slices, query.along
        if not along.slices.is_like(own) or not any(map(is_sliced, others)):
            return None
        if any(_length(x) != own.length for x in others):
            return None
        return [query.local, *(_slice(x, along) for x in others)]


def _sliced_query(x: Tensor) -> SlicedTensor | None:
    """Return queries that are slices of positions; None if they are not."""
    if not isinstance(x, SlicedTensor):
        return None
    is_of_positions = x.along.dim == x.ndim + _POSITIONS and x.along.count == 1
    return x if is_of_positions else None


def _length(x: Tensor) -> int:
    return x.along.length if isinstance(x, SlicedTensor) else x.shape[_POSITIONS]


def _slice(x: Tensor, along: Along) -> Tensor:
    dim = x.ndim + _POSITIONS
    if isinstance(x, SlicedTensor) and x.along.is_like(along) and x.along.dim == dim:
        return x.local
    return along.part(gathered(x), dim)
