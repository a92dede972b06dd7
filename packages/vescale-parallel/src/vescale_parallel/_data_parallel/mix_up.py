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


class ReducedGroups:
    """Tells whether ranks reduced the same groups of parameters, in the same order.

    Sums of a backend's own cannot carry tags: what arrived of whom is not to be seen in them. So
    ranks compare a digest of their order once a backward pass.
    """

    def __init__(self) -> None:
        self._digest = 0

    def add(self, number: int) -> None:
        """Note that a group is reduced."""
        self._digest = (self._digest * 31 + number + 1) % 251

    def bytes_to_compare(self) -> tuple[int, int]:
        """Return what ranks take the maximum of, for :meth:`check`; begin anew."""
        digest, self._digest = self._digest, 0
        return digest, 255 - digest

    def check(self, maxima: Sequence[int]) -> None:
        """Raise if a rank had another digest, given the maxima over ranks."""
        if sum(maxima) != 255:
            raise ValueError(
                "data-parallel ranks reduced the gradients of different blocks of the model at "
                f"the same time, so gradients got mixed up; {_ADVICE}"
            )


_ADVICE = (
    "with ZeRO stages 2 and 3 control flow must not depend on this rank's data: every rank runs "
    "the same blocks, as often. Use data_parallel.zero_stage 1"
)


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
        f"parameters got mixed up; {_ADVICE}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {few}"
