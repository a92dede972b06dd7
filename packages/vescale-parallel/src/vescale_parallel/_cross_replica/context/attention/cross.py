"""Attention of a slice to all of a sequence, by the model's own function.

To another sequence, as of a decoder to what an encoder returned: every rank has it whole, and so
its keys and values, and nothing is sent. And to the own one where a ring does not know what is
added to scores, or done with them: keys and values of all ranks are gathered then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._cross_replica.context.conversions import gather_slices
from vescale_parallel._cross_replica.context.slices import ContextRanks, SequenceSlices

from .heads import ARGUMENTS, check_slices
from .intercept import refuse_checkpoint_within
from .interface import Attends

_ROWS = -2  # the dim of masks and biases (.., queries, keys) that is of queries


class OfSlices(Attends, Protocol):
    """Attention of slices to their own sequence.

    Attributes:
        ranks: Those that share it.
        slices: Of the sequence that runs.
    """

    ranks: ContextRanks
    slices: SequenceSlices

    def computes(self, mask: Tensor | None, dropout: float, others: Mapping[str, Any]) -> bool:
        """Whether it knows scores with a mask, dropout, and other arguments."""
        ...


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

    @property
    def slices(self) -> SequenceSlices:
        """Of the sequence of the stack that runs."""
        return self._attention.slices

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
        mask, dropout = named.get("attn_mask"), named.get("dropout_p", 0.0)
        if self._attention.computes(mask, dropout, {}):
            return self._attention.scaled_dot_product(**named)
        key, value = self._all(named["query"], named["key"], named["value"])
        return self.to_whole({**named, "key": key, "value": value})

    def to_whole(self, named: Mapping[str, Any], slices: SequenceSlices | None = None) -> Tensor:
        """Return ``F.scaled_dot_product_attention`` to a sequence that every rank has whole.

        ``slices`` are of the queries, if not of the sequence of the stack that runs.
        """
        slices, mask = slices or self.slices, named.get("attn_mask")
        if named.get("is_causal") and mask is None:
            mask = _causal(slices, named["key"])
        mine = None if mask is None else self._rows_of(mask, slices)
        given = {**named, "attn_mask": mine, "is_causal": False}
        return self._inside(F.scaled_dot_product_attention, **given)

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
        module, query, key, value, *others = args
        mask = others[0] if others else kwargs.get("attention_mask")
        is_known = name in ("eager", "sdpa")
        if not is_known or self._attention.computes(mask, kwargs.get("dropout", 0.0), kwargs):
            return self._attention.of_interface(function, name, *args, **kwargs)
        key, value = self._all(query, key, value)
        # Of the two, sdpa makes the mask itself if it is given none.
        said = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if said is None else said
        if mask is None and name == "sdpa" and is_causal:
            mask = _causal(self.slices, key)[None, None]
        named = {name: x for name, x in kwargs.items() if name != "attention_mask"}
        return self.interface_to_whole(
            function, module, query, key, value, mask, *others[1:], **named
        )

    def interface_to_whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of transformers' interface makes of such a sequence."""
        module, query, key, value, *others = args
        mine = [self._rows(x, query) for x in others]
        named = {name: self._rows(x, query) for name, x in kwargs.items()}
        return self._inside(function, module, query, key, value, *mine, **named)

    def _all(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the keys and values of all ranks."""
        ranks, slices = self._attention.ranks, self.slices
        check_slices((query, key, value), slices, self._rank)
        refuse_checkpoint_within()
        return [gather_slices(x, x.ndim - 2, slices, ranks, sums=True) for x in (key, value)]

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False

    def _rows(self, x: Any, query: Tensor) -> Any:
        """Return what of a mask or bias (.., queries, keys) is of this rank's queries."""
        is_mask = isinstance(x, Tensor) and x.ndim >= query.ndim - 1
        return self._rows_of(x, self.slices) if is_mask else x

    def _rows_of(self, mask: Tensor, slices: SequenceSlices) -> Tensor:
        if mask.ndim < -_ROWS or mask.shape[_ROWS] != slices.length:
            return mask
        return slices.part(mask, mask.ndim + _ROWS, self._rank)


def _causal(slices: SequenceSlices, key: Tensor) -> Tensor:
    """Return which keys one device's queries read, of which ranks have their rows."""
    shape = slices.length, key.shape[-2]
    return torch.ones(*shape, dtype=torch.bool, device=key.device).tril()
