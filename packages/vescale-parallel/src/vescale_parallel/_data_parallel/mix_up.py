"""What to say where ranks exchanged parameters or gradients of different groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ArrivedTags:
    """Says whose parameters or gradients arrived, where they are not of the group that should be.

    Args:
        group: The ranks that exchange them; None if this rank is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # On a GPU: those since the last check.
        self._unseen: list[Tensor] = []

    def look(self, tags: Tensor, expected: Tensor) -> None:
        """Raise if the tags that ranks sent are not the expected ones; on a GPU, later."""
        if tags.device.type == "cpu" and not torch.compiler.is_compiling():
            # At once where that is free: what ranks exchange next may not even be of one size.
            if not torch.equal(tags, expected):
                self._check(tags.tolist())
        else:
            # On a GPU once a step: a look here would wait for the device.
            self._unseen.append(tags.clone())

    def check(self) -> None:
        """Raise if tags since the last call were not the expected ones."""
        unseen, self._unseen = self._unseen, []
        if unseen:
            for tags in torch.stack(unseen).tolist():
                self._check(tags)

    def _check(self, tags: Sequence[float]) -> None:
        if self._group is not None and len(set(tags)) > 1:
            raise mixed_up_error(self._group, tags)


def mixed_up_error(group: dist.ProcessGroup, tags: Sequence[float]) -> ValueError:
    """Return what to raise where ranks exchanged parameters of different groups.

    Args:
        group: The ranks that did.
        tags: What the ranks said their group of parameters is, in the order of the group.
    """
    ranks, own = dist.get_process_group_ranks(group), tags[dist.get_rank(group)]
    other = [rank for rank, tag in zip(ranks, tags, strict=True) if tag != own]
    return ValueError(
        f"data-parallel ranks ran different blocks of the model at the same time (rank "
        f"{dist.get_rank()} another one than {_ranks(other)}), so "
        "parameters got mixed up; with ZeRO stages 2 and 3 control flow must not "
        "depend on this rank's data: every rank runs the same blocks, as often. Use "
        "data_parallel.zero_stage 1"
    )


def _ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {few}"
