"""Sums and means over the ranks that share a batch."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_gather, ordered_sum

from .mesh import data_groups, data_rank, data_size


class DataRanks:
    """The data-parallel ranks of a mesh, over all of ``DATA_AXES``.

    Args:
        mesh: The plan's mesh.
        context: How many of them, next to each other, share every sequence.

    Attributes:
        num_parts: Of the global batch; ranks that share sequences have the same.
        part: This rank's.
    """

    def __init__(self, mesh: DeviceMesh, context: int = 1) -> None:
        self._groups = data_groups(mesh)
        self.size, self.rank = data_size(mesh), data_rank(mesh)
        self.num_parts, self.part = self.size // context, self.rank // context

    def total(self, value: Tensor) -> Tensor:
        """Sum over ranks, in rank order. Every rank must call this."""
        for group in self._groups:
            value = ordered_sum(all_gather(value, group), accumulate=value.dtype)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """Average over ranks. Every rank must call this."""
        return self.total(value) / self.size
