"""A pending sum is reduced once, for all operators that need it whole.

[Note: sums are reduced once] The output of a layer that is cut by rows is a pending sum, read by a
norm, by the layers after the norm and by the residual stream. The first operator that cannot go
on with the terms reduces them over the ranks. What it gets is kept with the tensor and its
views, and later operators take it in place of the terms, until either is written to. What the
program sees of the tensor, its placements and its part, stays as it was.

So whether an operator computes with terms or with their sum depends on the operators before it,
which are the same on every rank. The sum lives as long as the tensor or a view of it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, without_partial
from vescale_dtensor._torch_private import pytree

from .dtensor import DTensor, layout_of, redistributed, wrap
from .watched_memory import num_writes


class PendingSum:
    """The terms of a sum, what they add up to once that is known, and whose view they are.

    ``version`` is how often torch saw the tensor being written, or what it shares memory with.

    Args:
        terms: A tensor of which something is pending.
        base: Of the tensor that ``terms`` is a view of.
        view: Makes the view from the sum of the base.
    """

    __slots__ = ("_base", "_given", "_num_untold", "_sum", "_terms", "_view", "_when")

    def __init__(
        self,
        terms: DTensor,
        base: PendingSum | None = None,
        view: Callable[[DTensor], DTensor] | None = None,
    ) -> None:
        # Not the tensor itself, which has this: neither would be freed without the collector.
        self._terms = wrap(terms._local_tensor, layout_of(terms))
        self._base = base
        self._view = view
        self._given: list[Tensor] = []
        self._sum: DTensor | None = None
        self._when = 0
        self._num_untold = 0

    def is_of(self, tensor: DTensor) -> bool:
        """Whether ``tensor`` is still laid out, and in memory, where its terms were."""
        same = tensor._local_tensor is self._terms._local_tensor
        return same and tensor._spec is self._terms._spec

    def give(self, local: Tensor) -> None:
        """Take note that the program has this view of the terms, and may write to it."""
        if self._base is not None:
            self._base.give(local)
        elif all(each is not local for each in self._given):
            self._given.append(local)

    def count_untold(self) -> None:
        """Count a write that torch does not see, to the terms or what they share memory with."""
        self._num_untold += 1
        if self._base is not None:
            self._base.count_untold()

    def known(self, version: int) -> DTensor | None:
        """Return the sum if it was reduced since the last write."""
        if self._sum is not None and self._when == self._now(version):
            return self._sum
        base = None if self._base is None else self._base.known(version)
        return None if base is None else self._kept(self._of_base(base), version)

    def reduced(self, version: int) -> DTensor:
        """Return the sum. All ranks of the mesh call this."""
        if (known := self.known(version)) is not None:
            return known
        base = self._base
        if base is not None and base._terms.numel() == self._terms.numel():
            return self._kept(self._of_base(base.reduced(version)), version)
        placements = without_partial(self._terms.placements)
        return self._kept(redistributed(self._terms, placements), version)

    def _of_base(self, base: DTensor) -> DTensor:
        assert self._view is not None
        return self._view(base)

    def _kept(self, made: DTensor, version: int) -> DTensor:
        self._sum, self._when = made, self._now(version)
        return made

    def _now(self, version: int) -> int:
        """Return a number that grows with every write, be it to a rank's part alone."""
        base = 0 if self._base is None else self._base._now(version)
        locals_ = (self._terms._local_tensor, *self._given)
        return version + base + self._num_untold + sum(map(num_writes, locals_))


def known_sum(tensor: Any) -> Any:
    """Return what a pending sum adds up to if some operator reduced it; else ``tensor`` itself."""
    if type(tensor) is not DTensor or tensor._sum is None or not _keeps_sum(tensor):
        return tensor
    known = tensor._sum.known(tensor._version) if tensor._sum.is_of(tensor) else None
    return tensor if known is None else known


def count_untold(tensor: DTensor) -> None:
    """Take note of a write that the operator's schema conceals, so that torch counts none."""
    if tensor._sum is not None:
        tensor._sum.count_untold()


def moved(tensor: DTensor, target: Layout) -> DTensor:
    """Return ``tensor`` where an operator reads it, which must not write to it.

    All ranks of the mesh call this.
    """
    made = layout_of(tensor)
    sums = made.is_partial and target.placements == without_partial(made.placements)
    if not sums or not _keeps_sum(tensor):
        return redistributed(tensor, target.placements)
    return _sum_of(tensor).reduced(tensor._version)


def link(views: Any, base: DTensor, of: Callable[[DTensor], Any]) -> None:
    """Let views of a pending sum have views of what it adds up to.

    Args:
        views: What a view operator returned.
        base: What it was given.
        of: The operator, of another tensor.
    """
    if not _keeps_sum(base):
        return
    source = _sum_of(base)
    for index, view in enumerate(pytree.tree_leaves(views)):
        if layout_of(view).is_partial and view._alias_of is None:

            def of_sum(whole: DTensor, index: int = index) -> DTensor:
                return pytree.tree_leaves(of(whole))[index]

            view._sum = PendingSum(view, source, of_sum)


def _sum_of(tensor: DTensor) -> PendingSum:
    if tensor._sum is None or not tensor._sum.is_of(tensor):
        tensor._sum = PendingSum(tensor)
    return tensor._sum


def _keeps_sum(tensor: DTensor) -> bool:
    """Whether torch counts what is written to a tensor."""
    return tensor._alias_of is None and not torch.is_inference(tensor)
