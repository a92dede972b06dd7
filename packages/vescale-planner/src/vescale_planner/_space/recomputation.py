"""How blocks run again in backward: what a plan says as two numbers, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from vescale_parallel import recompute_by_block

Recompute = Literal["none", "selective", "full"]


def priced_recompute(
    said: Recompute | Mapping[str, Recompute], block_names: Sequence[str]
) -> tuple[Recompute, float] | None:
    """Return as what a plan's ``recompute`` is priced: how blocks run again, and which part does.

    None if that is not one mode of some blocks of which the others keep everything.
    """
    if isinstance(said, str):
        return said, 1.0
    # A block that is called twice is there as ``fqn#2`` as well.
    names = [name.partition("#")[0] for name in block_names]
    try:
        modes = recompute_by_block(said, tuple(dict.fromkeys(names)))
    except ValueError:  # of a block that no pipeline could be cut at
        return None
    again: list[Recompute] = [modes[name] for name in names if modes[name] != "none"]
    if not again:
        return "none", 1.0
    share = len(again) / len(names)
    return (again[0], share) if len({*again}) == 1 else None


def recompute_of(
    mode: Recompute, share: float, block_names: Sequence[str], starts: Sequence[int]
) -> Recompute | dict[str, Recompute]:
    """Return what a plan says to have that share of each stage's blocks run again.

    The first ones do: what they kept would be in memory the longest.

    Args:
        mode: How they run again.
        share: Of the blocks of a stage.
        block_names: Of all blocks.
        starts: The first block of every stage.
    """
    if mode == "none" or share == 1:
        return mode
    first = (
        block_names[start : start + math.ceil(share * (end - start) - 1e-6)]
        for start, end in pairwise([*starts, len(block_names)])
    )
    return {name: mode for names in first for name in names}
