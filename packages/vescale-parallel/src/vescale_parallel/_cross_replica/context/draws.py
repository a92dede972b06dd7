"""Random numbers that blocks draw for slices: where they lie in what one device draws.

Where a model is run whole to be compared, the draws between the beginning and the end of a stack
are noted. On a rank those of the same module and number have one dim that is shorter: along the
sequence, or along the heads while all-to-all attention computes. Whatever is taken for that dim,
what ranks then make of their numbers is compared with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import NotedOrder, Order

# A module, the number of the draw in a call of it, and dims of what is drawn.
DrawKey = tuple[str, int, int]
ExtentOf = Callable[[int], Extent]  # what of a dim a rank has, if it has not all of it


@dataclass(frozen=True)
class WholeDraw:
    """What one device draws at a place, where the model is compared with it."""

    shape: tuple[int, ...]
    order: Order


@dataclass(frozen=True)
class DrawnDim:
    """Which dim of what it draws a rank has a part of.

    Attributes:
        dim: None if it draws the whole.
        is_folded: Whether that dim is within another one, as in (batch * sequence).
        order: In which dims lie in memory, whole and on a rank.
    """

    dim: int | None
    is_folded: bool
    order: NotedOrder

    @staticmethod
    def between(
        whole: WholeDraw, shape: tuple[int, ...], order: Order, extent_of: ExtentOf
    ) -> DrawnDim:
        """Compare what is drawn on one device and on a rank.

        Raises:
            ValueError: If they differ by something else than a rank's part of a dim.
        """
        noted = NotedOrder(whole.order, order)
        differing = [d for d, n in enumerate(shape) if whole.shape[d] != n]
        if not differing:
            return DrawnDim(None, is_folded=False, order=noted)
        dim = differing[0]
        extent = extent_of(dim)
        count, rest = divmod(shape[dim], extent.here)
        if len(differing) > 1 or rest or whole.shape[dim] != count * extent.length:
            raise ValueError(
                f"random numbers of shape {shape} are drawn, and of {whole.shape} on one device, "
                "which is not this rank's part of one dim"
            )
        # Of one row, (batch * sequence) is as (sequence,).
        return DrawnDim(dim, is_folded=count > 1 or dim == 0, order=noted)

    def extents(self, shape: tuple[int, ...], extent_of: ExtentOf, fqn: str) -> dict[int, Extent]:
        """Return what of what is drawn now a rank has, by dim."""
        if self.dim is None:
            return {}
        extent = extent_of(self.dim)
        count, rest = divmod(shape[self.dim], extent.here)
        if rest or (count > 1 and not self.is_folded):
            raise ValueError(
                f"context_parallel: expected {fqn!r} to draw random numbers for {extent.here} of "
                f"{extent.length} in dim {self.dim}, as it did when the model was compared with "
                f"one device, got shape {shape}"
            )
        return {self.dim: extent.repeated(count)}


@dataclass(frozen=True)
class SlicedDraw:
    """What of what is drawn now a rank has, of those that share sequences.

    Attributes:
        extents: By dim.
        order: How dims lie in memory, whole and on a rank.
        of_slice: Whether it is a part of this rank's slice, which others have parts of, too.
    """

    extents: dict[int, Extent]
    order: NotedOrder
    of_slice: bool


class MasksOfAttention(Protocol):
    """The mask of dropout of one call of attention, (.., heads, S, S) on one device."""

    def block(self, weights: Tensor, queries: Extent, keys: Extent) -> Tensor:
        """Return what weights (.., heads, Q, K) are multiplied with, whenever it is asked."""
        ...


class DrawsSlices(Protocol):
    """Has modules draw this rank's part of what one device draws."""

    def install(self, model: nn.Module) -> None:
        """Have the modules of a model draw so, in place."""
        ...

    def masks(self, fqn: str, index: int, rate: float, shape: tuple[int, ...]) -> MasksOfAttention:
        """Return the mask of dropout that a module draws now, for weights of this rank's shape."""
        ...
