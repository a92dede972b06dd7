"""Recomputation of as few blocks as make a plan fit, where all need not run again.

Memory and time fall and rise with the number of blocks that run again (Korthikanti et al. 2022,
sec. 5; Megatron-LM's ``--recompute-method block``), so few numbers are priced of each plan that
fits with all of them and does not with none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vescale_planner._space.candidates import Candidate
from vescale_planner._space.layouts import Layout

from .ranking import TIE, ScoredCandidate

# Plans of one layout that are priced so, those first that would be fastest.
_PRICED = 16


def with_some_blocks(
    scored: Sequence[ScoredCandidate],
    price: Callable[[Iterable[Candidate]], list[ScoredCandidate]],
    num_blocks: int,
    memory_bytes: int,
) -> list[ScoredCandidate]:
    """Return candidates of which some blocks run again, for those where that may be faster.

    Args:
        scored: All others.
        price: Predicts candidates.
        num_blocks: Of the model.
        memory_bytes: Of a device.
    """
    whole = {each.candidate: each for each in scored if each.candidate.recompute == "none"}
    fastest: dict[Layout, float] = {}
    pairs: dict[Layout, list[tuple[ScoredCandidate, ScoredCandidate]]] = {}
    for each in scored:
        if each.needed_bytes > memory_bytes:
            continue
        layout = each.candidate.layout
        fastest[layout] = min(fastest.get(layout, math.inf), each.seconds_per_row)
        without = whole.get(replace(each.candidate, recompute="none"))
        if each.candidate.recompute == "full" and without and without.needed_bytes > memory_bytes:
            pairs.setdefault(layout, []).append((without, each))
    found: list[Candidate] = []
    for layout, both in pairs.items():
        # None is faster than with nothing that runs again.
        faster = [pair for pair in both if pair[0].seconds_per_row * TIE < fastest[layout]]
        faster.sort(key=lambda pair: (pair[0].seconds_per_row, pair[0].candidate))
        for without, full in faster[:_PRICED]:
            found += _fewest(without, full, num_blocks, memory_bytes)
    return price(found)


def _fewest(
    without: ScoredCandidate, full: ScoredCandidate, num_blocks: int, memory_bytes: int
) -> list[Candidate]:
    """Return candidates around the one that fits with the fewest blocks.

    Between both memory is linear, but for what one block makes of itself as it runs again.
    """
    blocks = math.ceil(num_blocks / full.candidate.stages)
    saved = without.needed_bytes - full.needed_bytes
    share = (without.needed_bytes - memory_bytes) / saved if saved > 0 else 1.0
    enough = math.ceil(share * blocks)
    counts = range(max(1, enough - 1), min(blocks, enough + 3))
    return [replace(full.candidate, recomputed=count / blocks) for count in counts]
