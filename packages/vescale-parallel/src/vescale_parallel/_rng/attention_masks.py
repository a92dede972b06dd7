"""Dropout of attention in blocks, of which no rank has all weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from vescale_dtensor.random import Fill
from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import NotedOrder

from .known_draws import ShardedDraw
from .part_of_whole import DrawsOfRank


class AttentionMasks:
    """The mask of one call of attention, of which blocks are drawn, and again in backward.

    Args:
        draws: Of the call of the model.
        cut: Of the mask (.., heads, S, S).
        rate: Of what is dropped.
        num_dims: Of the mask.
        drawing: Makes a context in which what is drawn counts for no module.
    """

    def __init__(
        self,
        draws: DrawsOfRank,
        cut: ShardedDraw,
        rate: float,
        num_dims: int,
        drawing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        # Weights are a product of matrices, without gaps.
        dims = tuple(range(num_dims))
        self._cut = replace(cut, order=NotedOrder(dims, dims))
        self._draws, self._rate, self._drawing = draws, rate, drawing
        self._begin, self._has_drawn = torch.default_generator.get_state(), False

    def block(self, weights: Tensor, queries: Extent, keys: Extent) -> Tensor:
        """Return what a block of weights is multiplied with.

        Drawing a block leaves the generator where drawing the whole does; that is right once.
        """
        generator, last = torch.default_generator, weights.dim() - 1
        held = generator.get_state()
        cut = replace(self._cut, extents={last - 1: queries, last: keys})
        mask = torch.empty(weights.shape, dtype=weights.dtype)
        generator.set_state(self._begin)
        with self._drawing():
            self._draws.part(mask, cut).draw(Fill("bernoulli_", (1 - self._rate,)))
        if self._has_drawn:
            generator.set_state(held)
        self._has_drawn = True
        return mask.div_(1 - self._rate)
