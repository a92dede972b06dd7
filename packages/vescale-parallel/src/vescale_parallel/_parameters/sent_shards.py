"""What gathers send of shards that are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .changes import Changes, changes_of
from .flat_shards import FlatShards
from .host_memory import empty_on_host
from .sharded_parameter import ShardedParameter


@dataclass(frozen=True)
class Offload:
    """What is on the host: this rank's shards, and the gradients of these.

    Attributes:
        stays: Whether the device has the shards too, in the dtype that computes.
        is_gathered_often: Whether they are gathered also if they have not changed.
    """

    stays: bool
    is_gathered_often: bool


class SentShards:
    """This rank's ranges of some flat buffers, in the dtype that computes.

    They are cast when they have changed, not when they are sent.

    Args:
        flat: Those of which the range is on the host.
        changes: The writes to them; None if they are sent only when there were some.
        stay: Whether the device keeps them, in the dtype that computes.
    """

    def __init__(self, flat: Sequence[FlatShards], changes: Changes | None, *, stay: bool) -> None:
        self._flat, self._changes, self._stay = flat, changes, stay
        self._cast: dict[FlatShards, Tensor] = {}

    def tell_changed(self) -> None:
        """Say that the ranges were written."""
        if self._changes is not None:
            self._changes.told = True

    def update(self) -> None:
        """Cast, or bring to the device, what has changed; on the stream that is current."""
        if self._changes is not None and not self._changes.look():
            return
        for shards in self._flat:
            if not self._stay and shards.compute_dtype == shards.dtype:
                continue
            if shards not in self._cast:
                empty, shape = torch.empty if self._stay else empty_on_host, shards.own.shape
                self._cast[shards] = empty(shape, dtype=shards.compute_dtype, device=shards.device)
            own = _arrived(shards.own, shards.device) if self._stay else shards.own
            self._cast[shards].copy_(own)
        if self._changes is not None:
            self._changes.note()

    def bring(self, shards: FlatShards) -> Tensor:
        """Return a range on the device, in its place among those that are gathered.

        Of the stream that is current; the buffer must have memory.
        """
        own = shards.whole[shards.rank]
        own.copy_(self._cast.get(shards, shards.own), non_blocking=True)
        return own


def sent_from_host(offload: Offload, placed: Mapping[ShardedParameter, FlatShards]) -> SentShards:
    """Return what is sent of the buffers that parameters are in."""
    changes = changes_of(placed) if offload.is_gathered_often else None
    return SentShards([*dict.fromkeys(placed.values())], changes, stay=offload.stays)


def _arrived(source: Tensor, device: torch.device) -> Tensor:
    """Return a copy of memory of the host on a device, which casts faster."""
    arrived = torch.empty(source.shape, dtype=source.dtype, device=device)
    return arrived.copy_(source, non_blocking=True)
