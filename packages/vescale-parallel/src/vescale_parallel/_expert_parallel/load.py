"""Load of experts: how many tokens each got, counted where they are and summed when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_reduce
from vescale_parallel._mesh.mesh import DATA_AXES, axis_group
from vescale_parallel._mesh.process_group import this_device
from vescale_parallel._torch_private import is_in_backward


class Counted:
    """Tokens of this rank that each expert of a module got; stays on the device.

    Attributes:
        is_repeated: Whether tokens of now are those of another rank, which counts them.
    """

    def __init__(self, num_experts: int) -> None:
        self.is_repeated: Callable[[], bool] = lambda: False
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=this_device())

    def add(self, counts: Tensor) -> None:
        """Count a forward that has gradients, and not when backward runs it again."""
        if torch.is_grad_enabled() and not is_in_backward() and not self.is_repeated():
            self._counts += counts

    def take(self) -> Tensor:
        """Return what was counted since the last call."""
        taken, self._counts = self._counts, torch.zeros_like(self._counts)
        return taken


class Load:
    """What all modules counted, and the ranks it is summed over.

    Args:
        counted: By the FQN of the module that holds the experts.
        mesh: The plan's; tensor-parallel ranks have the same tokens.
    """

    def __init__(self, counted: Mapping[str, Counted], mesh: DeviceMesh) -> None:
        self._counted = counted
        self._groups = [axis_group(mesh, axis) for axis in (*DATA_AXES, "pp")]

    def count_once(self, is_repeated: Callable[[], bool]) -> None:
        """Leave out tokens while another rank counts the same ones."""
        for each in self._counted.values():
            each.is_repeated = is_repeated

    def take(self) -> dict[str, Tensor]:
        """Return the sum over ranks of what was counted since the last call."""
        taken = [each.take() for each in self._counted.values()]
        if not taken:
            return {}
        together = torch.cat(taken)
        for group in self._groups:
            if group is not None:
                together = all_reduce(together, group)
        parts = together.split([*map(len, taken)])
        return dict(zip(self._counted, parts, strict=True))


def count_once(model: nn.Module, is_repeated: Callable[[], bool]) -> None:
    """Leave out tokens of which another rank has the same, while ``is_repeated()``."""
    load = getattr(model, "_vescale_expert_load", None)
    if isinstance(load, Load):
        load.count_once(is_repeated)


def expert_load(model: nn.Module) -> dict[str, Tensor]:
    """Return how many tokens of all ranks each expert got. Every rank must call this.

    Counted are forward passes with gradients since the last call of this, so that calling it once
    a step gives the load of the step, all micro-batches together: a token counts once for each of
    its ``top_k`` experts. A step does nothing for it but add the counts that it has anyway, on
    the device; only this call sends a few numbers, in one collective for each axis of the mesh.

    Args:
        model: A parallelized model.

    Returns:
        By the name of the module that holds the experts, int64 counts of shape (experts,) on
        the device of the model. Empty without expert parallelism.

    Raises:
        TypeError: If the model is not parallelized.

    Example:
        >>> from vescale_parallel import ParallelPlan, parallelize
        >>> expert_load(parallelize(ParallelPlan(), nn.Linear(4, 2)))
        {}
    """
    if not hasattr(model, "_vescale_engine"):
        raise TypeError(
            f"expected the model that parallelize returned, got {type(model).__name__}"
        )
    load = getattr(model, "_vescale_expert_load", None)
    return load.take() if isinstance(load, Load) else {}
