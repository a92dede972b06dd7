"""What to say where ranks exchanged parameters or gradients of different groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


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
