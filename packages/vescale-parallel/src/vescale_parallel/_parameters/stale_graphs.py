"""Backward through a forward of before parameters changed raises, as on one device.

[Note: stale graphs] Autograd keeps the plain parameters that computed, and refuses them once
torch counts a write. What a step of the optimizer, or anybody, writes is the public parameter; the
plain one gets it uncounted, when it is gathered again. So writes to the public ones are counted
for the plain ones, too: otherwise a graph of before would be differentiated with other values than
those that computed it. An optimizer says which it has written; other writes are seen by the
versions of public parameters, before the next forward or backward pass; and by those of their
shards where these are parts of what computes, for a write through ``.data``, which one device does
not count, would be to a part of it only. What forward itself writes is counted by torch, on the
plain parameters that it has.

A loss whose gradients were computed in the call, a pipeline's, has no graph that could be refused:
writes are counted for every public parameter, those of other stages too, and all ranks compare the
numbers of then with those of now before they hand the gradients out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from .sharded_parameter import ShardedParameter


class StaleGraphs:
    """Counts writes to public parameters for the plain ones; see [Note: stale graphs]."""

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        # Inference tensors are in no graph, and count no writes.
        counted = [param for param in params if not param.sharded.is_inference()]
        # By identity: a tensor's hash is two calls, for every parameter in every step.
        self._plain = {
            id(param.sharded): param.unsharded
            for param in counted
            if param.unsharded is not None and not param.unsharded.is_inference()
        }
        self._num_writes = dict.fromkeys((id(param.sharded) for param in counted), 0)
        parts = [p for p in counted if id(p.sharded) in self._plain and _is_in_plain(p)]
        # What is written, and the public parameter; with shards that are parts of what computes.
        self._watched = [(param.sharded, param.sharded) for param in counted]
        self._watched += [(param.local, param.sharded) for param in parts]
        self._versions = list[int]()
        self.note()

    def tell_changed(self, publics: Iterable[object]) -> None:
        """Count a write to each of some public parameters."""
        written = self._num_writes.keys() & {*map(id, publics)}
        for each in written:
            self._num_writes[each] += 1
        increment_version([self._plain[each] for each in written & self._plain.keys()])

    def as_now(self) -> Callable[[Iterable[ShardedParameter]], None]:
        """Return what raises if one of some parameters was written after this."""
        before = dict(self._num_writes)

        def check(used: Iterable[ShardedParameter]) -> None:
            self.look()
            for param in used:
                key = id(param.sharded)
                if self._num_writes.get(key) != before.get(key):
                    raise RuntimeError(_stale(param.fqns[0]))

        return check

    def note(self) -> None:
        """Have what was written so far count as it does; torch counts what forward writes."""
        self._versions = [written._version for written, _ in self._watched]

    def look(self) -> None:
        """Count the writes since the last look or note, that nobody told of."""
        if torch.compiler.is_compiling():
            return
        before = self._versions
        self.note()
        if before != self._versions:
            watched = zip(self._watched, self._versions, before, strict=True)
            self.tell_changed([public for (_, public), now, then in watched if now != then])


def _is_in_plain(param: ShardedParameter) -> bool:
    """Whether what is written to the shard is written to what computes."""
    return param.place is not None and param.place.shards.is_in_whole


def _stale(fqn: str) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {fqn!r} was written, by optimizer.step() for example, after the call whose "
        "loss is differentiated now; its gradients are those of the values of before. Call "
        "backward() before the step, or the model again"
    )
