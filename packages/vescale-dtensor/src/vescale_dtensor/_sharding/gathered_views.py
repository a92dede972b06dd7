"""Views that had to be gathered, and still are views.

[Note: gathered views] Some views cannot be made of a rank's part: ``x.diagonal()`` of a tensor cut
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
from torch.autograd.graph import increment_version

from vescale_dtensor._layout.layout import Placements
from vescale_dtensor._redistribute.execute import redistribute_local
from vescale_dtensor._redistribute.plan import redistribution_numel
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, redistributed, wrap
from vescale_dtensor._tensor.watched_memory import num_writes
from vescale_dtensor._torch_private import pytree

from .op_call import Unsupported

_UNKNOWN = -1


class GatheredView:
    """How a view follows its base, which is moved to ``placements`` first.

    ``of`` makes the operator's local results from the local tensor of the moved base; the view is
    the one at ``index``.
    """

    def __init__(
        self, base: DTensor, of: Callable[[Tensor], Any], index: int, placements: Placements
    ) -> None:
        self._base = _as_it_is(base)
        self._of = of
        self._index = index
        self._placements = placements
        self._counter = base
        self._version = self._now()

    def count_writes_of(self, tensor: DTensor) -> None:
        """Take ``tensor`` for what tells whether the base was written."""
        self._counter = tensor
        self._version = self._now()

    def refresh(self, view: DTensor, *, alone: bool = False) -> None:
        """Make ``view`` again if its base was written since. All ranks of the mesh call this.

        A rank that is ``alone`` may call it by itself, and is refused if it would have to
        communicate.
        """
        self._base._settled(alone=alone)
        version = self._now()
        if version == self._version:
            return
        made = layout_of(self._base)
        sent = redistribution_numel(
            tuple(made.shape), tuple(made.mesh.shape), made.placements, self._placements
        )
        if alone and sent:
            raise Unsupported(
                f"this rank's part of a view of {made} was gathered, and what it is a view of was "
                "written since: reading the part would communicate, which a rank cannot do alone. "
                "Use the view in an operator, view.clone() for example, on every rank, and read "
                "the part of that"
            )
        self._version = version
        fresh = self._view(redistributed(self._base, self._placements)._local_tensor)
        view._local_tensor.copy_(fresh)

    def write_back(self, view: DTensor) -> None:
        """Write what ``view`` holds to its base. All ranks of the mesh call this."""
        # An error, of a base whose elements share memory, leaves the view to be made again.
        version, self._version = self._version, _UNKNOWN
        whole = redistributed(self._base, self._placements)._local_tensor
        self._view(whole).copy_(view._local_tensor)
        made = layout_of(self._base)
        part = redistribute_local(whole, made.mesh, made.shape, self._placements, made.placements)
        self._base._local_tensor.copy_(part)
        if self._base._alias_of is not None:
            self._base._alias_of.write_back(self._base)
        self._version = version

    def _now(self) -> int:
        return _version(self._counter) + num_writes(self._base._local_tensor)

    def _view(self, whole: Tensor) -> Tensor:
        return pytree.tree_leaves(self._of(whole))[self._index]


class Follower:
    """A view, of a rank's part as any other, of a view that has a :class:`GatheredView`.

    The local tensor of that view, ``base``, is shared, and so need not be copied to here.
    """

    def __init__(self, base: DTensor) -> None:
        self._base = _as_it_is(base)

    def refresh(self, view: DTensor, *, alone: bool = False) -> None:
        """Bring the shared local tensor up to date; see :meth:`GatheredView.refresh`."""
        self._base._settled(alone=alone)

    def write_back(self, view: DTensor) -> None:
        """Write what the shared local tensor holds to what ``base`` is a view of."""
        self._base._alias_of.write_back(self._base)


class Unversioned(Follower):
    """What ``.data`` of a tensor has: autograd does not see writes to it, but views do."""

    def write_back(self, view: DTensor) -> None:
        """Let gathered views of the tensor know of a write, and what it is itself a view of."""
        increment_version(view._local_tensor)
        if self._base._alias_of is not None:
            super().write_back(view)


def unversioned(tensor: DTensor) -> DTensor:
    """Return ``tensor.data``: the same elements, outside of autograd."""
    if tensor._sum is not None:
        tensor._sum.give(tensor._local_tensor)
    made = wrap(tensor._local_tensor, layout_of(tensor), offset=int(tensor.storage_offset()))
    made._alias_of = Unversioned(tensor)
    return made


def follow(base: DTensor, views: Any) -> None:
    """Let views of a gathered view follow it."""
    for view in pytree.tree_leaves(views):
        if isinstance(view, DTensor) and view._alias_of is None:
            view._alias_of = Follower(base)


def _as_it_is(base: DTensor) -> DTensor:
    """Return a tensor that shares the elements, and stays when ``base`` is transposed in place."""
    kept = wrap(base._local_tensor, layout_of(base))
    kept._alias_of = base._alias_of
    return kept


def _version(tensor: DTensor) -> int:
    """Return how often a tensor, or what it is a view of, was written."""
    if torch.is_inference(tensor):
        raise Unsupported(
            "a view that has to be gathered or conjugated would become stale in "
            "torch.inference_mode(), where tensors do not count writes; use torch.no_grad()"
        )
    return tensor._version
