"""Attention of a slice to all of another sequence, as of a decoder to what an encoder returned.

Every rank has the other sequence whole, and so its keys and values. It attends to them with its
own queries, by the model's own function; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._cross_replica.context.slices import SequenceSlices

from .heads import ARGUMENTS
from .interface import Attends

_ROWS = -2  # the dim of masks and biases (.., queries, keys) that is of queries


class OfSlices(Attends, Protocol):
    """Attention of slices to their own sequence.

    Attributes:
        slices: Of the sequence that runs.
    """

    slices: SequenceSlices


class AttendsAcross:
    """Has slices attend to a whole sequence where keys are of one, and else to their own.

    Args:
        attention: To their own.
        rank: Which of the ranks that share a sequence this is.
        is_across: Whether attention that is called now, with keys of this length, is to another
            sequence.
    """

    def __init__(self, attention: OfSlices, rank: int, is_across: Callable[[int], bool]) -> None:
        self._attention, self._rank, self._is_across = attention, rank, is_across
        self._is_inside = False

    def wants(self) -> bool:
        """Whether attention that is called now is to be computed here."""
        return not self._is_inside and self._attention.wants()

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stand for ``F.scaled_dot_product_attention``."""
        named = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        is_across = self._is_across(named["key"].shape[-2])
        return self.to_whole(named) if is_across else self.of_own(named)

    def of_own(self, named: Mapping[str, Any]) -> Tensor:
        """Return ``F.scaled_dot_product_attention`` to the sequence of which these are slices."""
        return self._attention.scaled_dot_product(**named)

    def to_whole(self, named: Mapping[str, Any]) -> Tensor:
        """Return ``F.scaled_dot_product_attention`` to a sequence that every rank has whole."""
        mask = self._rows(named.get("attn_mask"), named["query"])
        return self._inside(F.scaled_dot_product_attention, **{**named, "attn_mask": mask})

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for a function of transformers' attention interface."""
        if self._is_across(args[2].shape[-2]):
            return self.interface_to_whole(function, *args, **kwargs)
        return self.interface_of_own(function, name, *args, **kwargs)

    def interface_of_own(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what such a function makes of slices."""
        return self._attention.of_interface(function, name, *args, **kwargs)

    def interface_to_whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of transformers' interface makes of such a sequence."""
        module, query, key, value, *others = args
        mine = [self._rows(x, query) for x in others]
        named = {name: self._rows(x, query) for name, x in kwargs.items()}
        return self._inside(function, module, query, key, value, *mine, **named)

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False

    def _rows(self, x: Any, query: Tensor) -> Any:
        """Return what of a mask or bias (.., queries, keys) is of this rank's queries."""
        slices = self._attention.slices
        if not isinstance(x, Tensor) or x.ndim < query.ndim - 1 or x.shape[_ROWS] == 1:
            return x
        return slices.part(x, x.ndim + _ROWS, self._rank) if x.shape[_ROWS] == slices.length else x
