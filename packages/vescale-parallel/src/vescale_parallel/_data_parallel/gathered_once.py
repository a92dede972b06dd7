"""Parameters that stay gathered are gathered, and cast, again only after they have changed.

Under ZeRO 0, 1 and 2 these are all. Under ZeRO 3 it is what a rank sends when a block is gathered,
where copies of the model share out its optimizer state (HFSDP).

What tells that they have is in [Note: what tells that parameters changed].
Ranks see their own writes only, and may differ in them. So before every call they tell each other
in a byte for every group of parameters whether it has changed, and gather it if it has on any: a
write on one rank alone neither hangs nor gets lost. A rank on which all have changed does not wait
for the answer, so a loop that steps after each backward pass pays a few bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_gather
from vescale_parallel._mesh.mesh import axis_group
from vescale_parallel._parameters.changes import Changes, changes_of

from .param_group import ParamGroup


@dataclass(eq=False)
class _GroupState:
    param_group: ParamGroup
    fill: Callable[[], None]
    changes: Changes

    def gather(self) -> None:
        self.changes.told = True  # until the gather has ended
        self.fill()
        self.changes.note()


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
            _GroupState(
                each, each.gather_sent if are_freed else each.gather, changes_of(each.params)
            )
            for each in kept
        ]
        self._group = axis_group(mesh, "dp_replicate" if are_freed else "dp_shard")
        self._device = mesh.device_type
        # By identity: a tensor's hash is a call of Python.
        self._state_of = {
            id(param.sharded): state
            for state in self._states
            for param in state.param_group.params
        }

    def tell_changed(self, publics: Iterable[object]) -> None:
        """Say that public parameters were written."""
        for public in publics:
            state = self._state_of.get(id(public))
            if state is not None:
                state.changes.told = True

    def gather(self) -> None:
        """Gather what has changed on any rank. All those ranks must call this."""
        if torch.compiler.is_compiling():  # a compiled program does the same in every call
            for state in self._states:
                state.gather()
            return
        own = [state.changes.look() for state in self._states]
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
