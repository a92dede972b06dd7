"""Whether views of the memory of a rank's part were handed out.

What is written through a view torch counts (``tensor._version``), but for collectives of
``torch.distributed``, NumPy and what leaves ``torch`` otherwise. Whoever keeps something computed
from the memory has to know that such a view was given away.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from vescale_dtensor._comm.emulation import RankTensor
from vescale_dtensor._comm.functional import is_traced


class WatchedMemory:
    """The memory of a plain tensor, and of all that are views of it: who may write to it.

    Watching ends with the life of this object.

    Args:
        tensor: What distributed tensors have on this rank, and the first view that is known.

    Attributes:
        num_given: How many views :meth:`DTensor.to_local` has handed out, of the tensor itself or
            of any other tensor in its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.num_given = 0
        self._own: list[weakref.ref[Tensor]] = []
        self.own(tensor)
        if _place(tensor):
            _watched[_place(tensor)] = self

    @staticmethod
    def of(tensor: Tensor) -> WatchedMemory | None:
        """Return what watches the memory of a tensor, None if nobody does."""
        place = _place(tensor)  # none of a tensor whose memory is empty
        return _watched.get(place) if place else None

    def own(self, tensor: Tensor) -> None:
        """Take a view for one of which all writes are known, as long as it lives."""
        if all(each() is not tensor for each in self._own):
            self._own.append(weakref.ref(tensor))

    @property
    def num_own(self) -> int:
        """How many of these views live."""
        self._own = [each for each in self._own if each() is not None]
        return len(self._own)


_watched: weakref.WeakValueDictionary[int, WatchedMemory] = weakref.WeakValueDictionary()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def num_writes(local: Tensor) -> int:
    """Return how often a rank's part was written other than by operators on the global tensor."""
    parts = local.parts if isinstance(local, RankTensor) else ()
    return sum(part._version for part in (local, *parts) if not torch.is_inference(part))


def handed_out(local: Tensor) -> Tensor:
    """Return what to give away of a rank's part: a view of its own if the memory is watched.

    So the memory tells, by the number of its views, whether somebody still has one.
    """
    if not _watched or not local.numel() or is_traced(local) or torch.compiler.is_compiling():
        return local
    watched = WatchedMemory.of(local) if type(local) is Tensor else None
    if watched is None:
        return local
    watched.num_given += 1
    return local.detach()
