"""What plans would win for which forward has to return its loss, where it was not seen to.

Gradient accumulation runs the rows of a rank one part after the other, and a pipeline does so too:
backward has to follow each part's forward, so the loss is made there and not in the loop. An
example batch without targets says nothing of that, and such plans may be the fastest by far: what
they are predicted to take is said, with what to give to have them.
"""

from __future__ import annotations

from dataclasses import replace

from ._prices.cost import seconds
from ._search.ranking import TIE, ScoredCandidate
from ._search.search import Search
from ._space.layouts import ACCUMULATION


def said_of_returned_loss(search: Search, winner: ScoredCandidate, world_size: int) -> list[str]:
    """Return what a loss that forward returns would win, if that is more than counts as equal."""
    if search.accumulates or winner.candidate.accumulation > 1:
        return []
    workload = replace(search.workload, returns_loss=True)
    batch = search.rows(world_size).global_size
    given = {**search.constraints, "batch.global_size": batch}
    with_loss = replace(search, workload=workload, constraints=given, accumulates=True)
    best = next(iter(with_loss.run(world_size).fits), winner)
    if winner.seconds_per_row <= TIE * best.seconds_per_row:
        return []
    ratio = best.seconds_per_row / winner.seconds_per_row
    how = "give an example_batch with which forward returns its loss, with labels for example"
    if best.candidate.accumulation > 1:
        how += f", or constrain {ACCUMULATION} to {best.candidate.accumulation}"
    took = f"{ratio:.3g} x the time, {seconds(best.step_seconds)} a step"
    return [f"priced, not chosen: {best.candidate}: {took}; {how}"]
