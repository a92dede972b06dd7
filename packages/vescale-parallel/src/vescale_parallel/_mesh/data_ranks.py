"""Sums and means over the ranks that share a batch."""

from __future__ import annotations

import torch
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

    def mean_beside(self, value: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Average a scalar over ranks, and say whether all gave the same number.

        That travels with it, modulo 251, which every floating-point dtype has. Every rank must
        call this.
        """
        told = torch.stack([value, value.new_full((), number % 251)])
        for group in self._groups:
            everyones = all_gather(told, group)
            numbers = everyones[:, 1]
            same = torch.where((numbers == numbers[0]).all(), numbers[0], -1)
            total = ordered_sum(everyones, accumulate=told.dtype)[0]
            told = torch.stack([total, same.to(told.dtype)])
        return told[0] / self.size, told[1] >= 0

    def mean(self, value: Tensor) -> Tensor:
        """Average over ranks. Every rank must call this."""
        return self.total(value) / self.size
