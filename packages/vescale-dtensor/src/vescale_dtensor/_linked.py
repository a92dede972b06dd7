"""Views that had to be gathered, and still are views.

[Note: linked views] Some views cannot be made of a rank's part: ``x.diagonal()`` of a tensor cut
in dim 0, for example. Then the base is gathered and the view is made of the copy. The result
remembers base and operator: before it is read it is made again if the base was written since,
and what is written to it is written to the base as well. So it behaves as the alias that it would
be on one device, at the price of moving the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._calls import Unsupported
from ._dtensor import DTensor, layout_of, moved, wrap
from ._redistribute import redistribute_local
from ._spec import Placements
from ._torch_private import pytree


class Link:
    """How a view follows its base.

    Args:
        base: What it is a view of.
        of: Makes the operator's local results from the local tensor of the moved base.
        index: Which of them.
        placements: Where the base is moved to.
    """

    def __init__(
        self, base: DTensor, of: Callable[[Tensor], Any], index: int, placements: Placements
    ) -> None:
        self._base = _as_it_is(base)
        self._of = of
        self._index = index
        self._placements = placements
        self._counter = base
        self._version = _version(base)

    def count_writes_of(self, tensor: DTensor) -> None:
        """Take ``tensor`` for what tells whether the base was written."""
        self._counter = tensor
        self._version = _version(tensor)

    def refresh(self, view: DTensor) -> None:
        """Make ``view`` again if its base was written since. All ranks of the mesh call this."""
        self._base._settled()
        version = _version(self._counter)
        if version == self._version:
            return
        self._version = version
        fresh = self._view(moved(self._base, self._placements)._local_tensor)
        view._local_tensor.copy_(fresh)

    def write_back(self, view: DTensor) -> None:
        """Write what ``view`` holds to its base. All ranks of the mesh call this."""
        whole = moved(self._base, self._placements)._local_tensor
        self._view(whole).copy_(view._local_tensor)
        made = layout_of(self._base)
        part = redistribute_local(whole, made.mesh, made.shape, self._placements, made.placements)
        self._base._local_tensor.copy_(part)
        if self._base._link is not None:
            self._base._link.write_back(self._base)

    def _view(self, whole: Tensor) -> Tensor:
        return pytree.tree_leaves(self._of(whole))[self._index]


class Follower:
    """A view, of a rank's part as any other, of a view that has a :class:`Link`.

    Args:
        base: That view. Its local tensor is shared, and so need not be copied to here.
    """

    def __init__(self, base: DTensor) -> None:
        self._base = _as_it_is(base)

    def refresh(self, view: DTensor) -> None:
        """Bring the shared local tensor up to date."""
        self._base._settled()

    def write_back(self, view: DTensor) -> None:
        """Write what the shared local tensor holds to what ``base`` is a view of."""
        self._base._link.write_back(self._base)


def follow(base: DTensor, views: Any) -> None:
    """Let views of a linked view follow it."""
    for view in pytree.tree_leaves(views):
        if isinstance(view, DTensor) and view._link is None:
            view._link = Follower(base)


def _as_it_is(base: DTensor) -> DTensor:
    """Return a tensor that shares the elements, and stays when ``base`` is transposed in place."""
    kept = wrap(base._local_tensor, layout_of(base))
    kept._link = base._link
    return kept


def _version(tensor: DTensor) -> int:
    """Return how often a tensor, or what it is a view of, was written."""
    if torch.is_inference(tensor):
        raise Unsupported(
            "a view that has to be gathered or conjugated would become stale in "
            "torch.inference_mode(), where tensors do not count writes; use torch.no_grad()"
        )
    return tensor._version
