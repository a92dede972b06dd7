"""Whether parameters were written since they were last gathered, or copied.

[Note: what tells that parameters changed]
A step of the optimizer that ``parallelize`` returned says so. Everything else is told by

- ``_version`` of the public parameter, of this rank's part and of the plain parameter that
  computes: what torch's operators write.
- how many views of its memory were handed out since it was gathered last, and whether anybody
  still has one: collectives of ``torch.distributed`` and NumPy write to those and torch does not
  count. The memory is that of all parameters in a flat buffer, which are gathered together anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vescale_dtensor import WatchedMemory
from vescale_parallel._torch_private import num_views

from .sharded_parameter import ShardedParameter

_Seen = tuple[int, ...]


@dataclass(eq=False)
class _Memory:
    """Where parts of parameters are on this rank."""

    whole: Tensor
    watched: WatchedMemory

    @property
    def has_views(self) -> bool:
        """Whether somebody else has a view of it."""
        return self.whole.numel() > 0 and num_views(self.whole) > self.watched.num_own + 1


@dataclass(eq=False)
class _Source:
    """What the plain values of a parameter were computed from."""

    param: ShardedParameter
    memory: _Memory

    def seen(self) -> _Seen | None:
        """Return what changes with every write that is noticed, None where torch counts none."""
        param = self.param
        assert param.unsharded is not None
        counted = (param.sharded, param.local, param.unsharded)
        if any(map(torch.is_inference, counted)):
            return None
        return (*(tensor._version for tensor in counted), self.memory.watched.num_given)


@dataclass(eq=False)
class Changes:
    """The writes to some parameters; see [Note: what tells that parameters changed].

    Attributes:
        told: Whether they are said to have changed, or nothing was noted yet.
    """

    _sources: list[_Source]
    _memories: list[_Memory]
    told: bool = True
    _seen: list[_Seen | None] = field(default_factory=list["_Seen | None"])

    def look(self) -> bool:
        """Whether parameters may have changed since :meth:`note`, on this rank."""
        if not self.told:
            seen = [source.seen() for source in self._sources]
            self.told = (
                None in seen
                or seen != self._seen
                or any(memory.has_views for memory in self._memories)
            )
        return self.told

    def note(self) -> None:
        """Note what parameters are now."""
        self._seen = [source.seen() for source in self._sources]
        self.told = False


def changes_of(params: Iterable[ShardedParameter]) -> Changes:
    """Return the writes to those of some parameters that compute in other memory."""
    sources: list[_Source] = []
    memories: dict[object, _Memory] = {}
    for param in params:
        if param.unsharded is None or param.shares_storage:
            continue
        whole = param.local if param.place is None else param.place.shards.own
        key = param if param.place is None else param.place.shards
        if key not in memories:
            memories[key] = _Memory(whole, WatchedMemory(whole))
            if param.place is not None and param.place.shards.is_sent_in_place:
                memories[key].watched.own(param.place.shards.sent)
        memories[key].watched.own(param.local)
        sources.append(_Source(param, memories[key]))
    return Changes(sources, [*memories.values()])
