"""What data-parallel ranks tell each other when a pass ends: of gradients, and of their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_gather
from vescale_parallel._mesh.mesh import DATA_AXES, axis_group
from vescale_parallel._parameters.sharded_parameter import ShardedParameter

from .mix_up import END_OF_BACKWARD, END_OF_FORWARD, Exchanges
from .param_group import ParamGroup, reduce_together

LATE = 2  # of a parameter with a gradient that is not reduced yet


class EndOfPass:
    """Ends passes.

    Args:
        mesh: The plan's mesh.
        params: Every parameter.
        param_groups: All of them.
        exchanges: What they exchange, in an order that ranks compare; None if they need not.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        params: Sequence[ShardedParameter],
        param_groups: Sequence[ParamGroup],
        exchanges: Exchanges | None,
    ) -> None:
        self._mesh, self._params, self._param_groups = mesh, params, param_groups
        self._exchanges = exchanges
        groups = [axis_group(mesh, axis) for axis in DATA_AXES]
        self._groups = [group for group in groups if group is not None]

    @property
    def has_copies(self) -> bool:
        """Whether there are other data-parallel ranks."""
        return bool(self._groups)

    def begin(self) -> None:
        """Note that backward ends, before reductions go on: who waits in them answers others."""
        if self._exchanges is not None:
            self._exchanges.begin(END_OF_BACKWARD, *self._groups)

    def used_anywhere(self, used: set[ShardedParameter]) -> dict[ShardedParameter, int]:
        """Whether each parameter got a gradient on any rank that could give it one, and how.

        Raises if ranks ran different blocks while they exchanged parameters.

        Args:
            used: Those that did on this rank in passes before, or on another stage.
        """
        used |= {param for param_group in self._param_groups for param in param_group.take_used()}
        flags = torch.tensor(
            [LATE if _has_gradient(param) else param in used for param in self._params],
            dtype=torch.uint8,
        )
        flags = self._exchange(flags.to(self._mesh.device_type))
        return dict(zip(self._params, flags.tolist(), strict=True))

    def reduce_late(self, used: dict[ShardedParameter, int]) -> None:
        """Reduce gradients that came after those of their group were reduced.

        Backward passes within the pass, of ``checkpoint(use_reentrant=True)``, give a parameter
        several.
        """
        if LATE not in used.values():
            return
        late = [
            param_group
            for param_group in self._param_groups
            if any(used[param] == LATE for param in param_group.params)
        ]
        reduce_together(late)
        for param_group in late:
            param_group.take_used()

    def compare_gathers(self) -> None:
        """Raise if ranks ran different blocks in a pass that reduces nothing."""
        group = axis_group(self._mesh, "dp_shard")
        if group is not None and self._exchanges is not None:
            self._exchanges.begin(END_OF_FORWARD, group)
            order = self._exchanges.bytes_to_compare().to(self._mesh.device_type)
            self._compare(self._exchanges, group, all_gather(order, group))
            self._exchanges.end(of_step=False)

    def _exchange(self, flags: Tensor) -> Tensor:
        """Return the largest flags of all data-parallel ranks."""
        if self._exchanges is None:
            for group in self._groups:
                flags = all_gather(flags, group).amax(0)
            return flags
        for group in self._groups:
            order = self._exchanges.bytes_to_compare().to(flags.device)
            everyones = all_gather(torch.cat([flags, order]), group)
            self._compare(self._exchanges, group, everyones[:, len(flags) :])
            flags = everyones[:, : len(flags)].amax(0)
        self._exchanges.end(of_step=True)
        return flags

    def _compare(self, exchanges: Exchanges, group: dist.ProcessGroup, everyones: Tensor) -> None:
        try:
            exchanges.compare(group, everyones)
        except ValueError:
            for param_group in self._param_groups:
                param_group.forget()
            raise


def _has_gradient(param: ShardedParameter) -> bool:
    return param.unsharded is not None and param.unsharded.grad is not None
