"""Find ranks that exchanged parameters or gradients of different groups with each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather

_DIGEST_NBYTES = 8


class Exchanges:
    """The groups of parameters that this rank exchanged, in order.

    Collectives pair by order alone, so ranks that run other blocks get each other's parameters.
    Ranks compare their order once a step, before anybody sees a gradient.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def add(self, number: int) -> None:
        """Note an exchange of the group with this number."""
        self._numbers.append(number)

    def digest(self) -> Tensor:
        """Return bytes that tell this order from others."""
        return torch.tensor(
            [*hash(tuple(self._numbers)).to_bytes(_DIGEST_NBYTES, signed=True)], dtype=torch.uint8
        )

    def check(self, group: dist.ProcessGroup, digests: Tensor) -> None:
        """Forget the order; raise if that of other ranks was another one.

        Args:
            group: The ranks that exchanged with each other. All of them must call this.
            digests: Theirs, (ranks, bytes).
        """
        numbers, self._numbers = self._numbers, []
        if torch.equal(digests, digests[:1].expand_as(digests)):
            return
        device = digests.device
        count = torch.tensor([len(numbers)], device=device)
        most = int(all_gather(count, group).max())
        padded = torch.tensor([*numbers, *[-1] * (most - len(numbers))], device=device)
        everyones = all_gather(padded, group)
        differs = (everyones != everyones[:1]).any(0)
        raise mixed_up_error(group, everyones[:, int(differs.int().argmax())].tolist())


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
