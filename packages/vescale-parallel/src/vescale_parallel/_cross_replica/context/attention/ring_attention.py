"""Attention of slices of a sequence: keys and values travel round the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vescale_parallel._cross_replica.context.draws import DrawsSlices, MasksOfAttention
from vescale_parallel._cross_replica.context.slices import ContextRanks, SequenceSlices
from vescale_parallel._trace.extents import Extent

from .heads import ARGUMENTS, check_slices
from .intercept import refuse_checkpoint_within
from .ring import Scoring, ring_attention

_INTERFACE = ("eager", "sdpa")
_USE_HEADS = "use context_parallel.method 'all_to_all'"


class RingAttention:
    """Attention of ranks that have slices of one sequence, and keep their queries.

    Functions of transformers' interface are not called but computed here: what they mean with
    their masks, scales and sinks. What one means otherwise is seen when the model is compared with
    one device.

    Attributes:
        slices: Of the sequence that runs.
    """

    def __init__(self, ranks: ContextRanks) -> None:
        self.ranks = ranks
        self.slices = SequenceSlices(())
        self._draws: DrawsSlices | None = None
        self._place: Callable[[], tuple[str, int] | None] = lambda: None

    def draw_by(self, draws: DrawsSlices, place: Callable[[], tuple[str, int] | None]) -> None:
        """Draw masks of dropout by ``draws``, at the place that is known of attention now."""
        self._draws, self._place = draws, place

    @property
    def is_along_sequence(self) -> bool:
        """Whether this rank has a slice of the sequence now: always."""
        return True

    def extent(self) -> Extent:
        """Return what this rank has of the sequence."""
        return Extent(self.slices.length, self.slices.ranges[self.ranks.rank])

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what ``F.scaled_dot_product_attention`` is called for on one device."""
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        query, key, value = (given[name] for name in ARGUMENTS[:3])
        return self._attend(
            query,
            key,
            value,
            mask=given.get("attn_mask"),
            scale=given.get("scale"),
            is_causal=given.get("is_causal", False),
            dropout=given.get("dropout_p", 0.0),
        )

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute what one of transformers' attention functions is called for on one device.

        They return (batch, positions, heads, features) and weights, which are None here.
        """
        module, query, key, value, *others = args
        mask = others[0] if others else kwargs.get("attention_mask")
        if name not in _INTERFACE:
            raise ValueError(
                f"context_parallel: a ring computes the attention functions {_INTERFACE}, got "
                f"{name!r}; use one of them, or {_USE_HEADS}"
            )
        is_causal = kwargs.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        sinks = kwargs.get("s_aux", getattr(module, "sinks", None))
        made = self._attend(
            query,
            key,
            value,
            mask=mask,
            scale=kwargs.get("scaling"),
            # Of the two, sdpa makes the mask itself if it is given none.
            is_causal=is_causal and mask is None and name == "sdpa",
            dropout=kwargs.get("dropout", 0.0),
            sinks=sinks,
        )
        return made.transpose(1, 2).contiguous(), None

    def wants(self) -> bool:
        """Whether attention that is called now is that of slices."""
        return True

    def computes(self, mask: Tensor | None, dropout: float, others: Mapping[str, Any]) -> bool:
        """Whether it knows scores with these: no soft caps, nor biases that are trained.

        And it has to know which of one device's draws its dropout is.
        """
        if any(others.get(each) is not None for each in ("softcap", "position_bias")):
            return False
        is_drawn = not dropout or (self._draws is not None and self._place() is not None)
        return is_drawn and (mask is None or not mask.requires_grad)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        is_causal: bool,
        dropout: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_slices((query, key, value), self.slices, self.ranks.rank)
        refuse_checkpoint_within()
        masks = self._masks(dropout, query) if dropout else None
        usual = query.shape[-1] ** -0.5
        scoring = Scoring(usual if scale is None else scale, is_causal=bool(is_causal), mask=mask)
        return ring_attention(
            query,
            key,
            value,
            scoring,
            slices=self.slices,
            ranks=self.ranks,
            sinks=sinks,
            masks=masks,
        )

    def _masks(self, dropout: float, query: Tensor) -> MasksOfAttention:
        """Return what draws the mask of dropout that one device draws for all of attention."""
        place = self._place()
        if self._draws is None or place is None or query.device.type != "cpu":
            raise ValueError(
                f"context_parallel: a ring draws dropout of attention ({dropout}) as one device "
                "does on the CPU, once a call of a module, in training; "
                f"{_USE_HEADS}, or set it to 0"
            )
        return self._draws.masks(*place, dropout, (*query.shape[:-1], query.shape[-2]))
