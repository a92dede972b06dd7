"""Parameters that stay gathered are gathered, and cast, again only after they have changed.

Under ZeRO 0, 1 and 2 these are all. Under ZeRO 3 it is what a rank sends when a block is gathered,
where copies of the model share out its optimizer state (HFSDP).

[Note: what tells that parameters changed]
A step of the optimizer that ``parallelize`` returned says so. Everything else is told by

- ``_version`` of the public parameter, of this rank's part and of the plain parameter that
  computes: what torch's operators write.
- how many views of its memory were handed out since it was gathered last, and whether anybody
  still has one: collectives of ``torch.distributed`` and NumPy write to those and torch does not
  count. The memory is that of all parameters in a flat buffer, which are gathered together anyway.

Ranks see their own writes only, and may differ in them. So before every call they tell each other
in a byte for every group of parameters whether it has changed, and gather it if it has on any: a
write on one rank alone neither hangs nor gets lost. A rank on which all have changed does not wait
for the answer, so a loop that steps after each backward pass pays a few bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import WatchedMemory, all_gather
from vescale_parallel._mesh.mesh import axis_group
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import num_views

from .param_group import ParamGroup

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
class _GroupState:
    param_group: ParamGroup
    fill: Callable[[], None]
    sources: list[_Source]
    memories: list[_Memory]
    has_changed: bool = True
    seen: list[_Seen | None] = field(default_factory=list["_Seen | None"])

    def look(self) -> bool:
        """Whether parameters of the group may have changed on this rank."""
        if not self.has_changed:
            seen = [source.seen() for source in self.sources]
            self.has_changed = (
                None in seen
                or seen != self.seen
                or any(memory.has_views for memory in self.memories)
            )
        return self.has_changed

    def gather(self) -> None:
        self.has_changed = True  # until the gather has ended
        self.fill()
        self.seen = [source.seen() for source in self.sources]
        self.has_changed = False


class GatheredOnce:
    """Parameter groups that stay gathered between calls.

    See [Note: what tells that parameters changed].

    Args:
        mesh: The plan's mesh.
        param_groups: In the order in which they are gathered.
        are_freed: Whether only what they send stays gathered, from copies that share it out.
    """

    def __init__(
        self, mesh: DeviceMesh, param_groups: Sequence[ParamGroup], *, are_freed: bool
    ) -> None:
        kept = [each for each in param_groups if not are_freed or each.has_replicas]
        self._states = [
            _state(each, each.gather_sent if are_freed else each.gather) for each in kept
        ]
        self._group = axis_group(mesh, "dp_replicate" if are_freed else "dp_shard")
        self._device = mesh.device_type
        self._state_of = {
            param.sharded: state for state in self._states for param in state.param_group.params
        }

    def tell_changed(self, publics: Iterable[object]) -> None:
        """Say that public parameters were written."""
        for public in publics:
            state = self._state_of.get(public)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if state is not None:
                state.has_changed = True

    def gather(self) -> None:
        """Gather what has changed on any rank. All those ranks must call this."""
        if torch.compiler.is_compiling():  # a compiled program does the same in every call
            for state in self._states:
                state.gather()
            return
        own = [state.look() for state in self._states]
        for state, has_changed in zip(self._states, self._on_any_rank(own), strict=True):
            if has_changed:
                state.gather()

    def _on_any_rank(self, own: Sequence[bool]) -> Sequence[bool]:
        if self._group is None or not own:
            return own
        flags = all_gather(self._flags(own), self._group)
        return own if all(own) else flags.amax(0).to(torch.bool).tolist()

    def _flags(self, own: Sequence[bool]) -> Tensor:
        return torch.tensor(own, dtype=torch.uint8).to(self._device)


def _state(param_group: ParamGroup, fill: Callable[[], None]) -> _GroupState:
    sources: list[_Source] = []
    memories: dict[object, _Memory] = {}
    for param in param_group.params:
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
    return _GroupState(param_group, fill, sources, [*memories.values()])
