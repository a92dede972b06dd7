"""How many bytes activations take at each of the moments that memory is counted at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vescale_parallel import simulate_schedule
from vescale_planner._partition import LocalPart, PipelineRank

from .columns import Columns, Numerics, Values, of_each

# Whose memory has a closed form.
USUAL_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")

# Of losses, whatever the dtype of logits.
_LOSS_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of some pipeline ranks at every moment: (ranks, candidates) each.

    Attributes:
        kept: What forward keeps for backward, and what backward makes on its way.
        output: What the model returns, and its gradient.
        all_in_flight: Whether all micro-batches of a step are, before the first has its backward.
    """

    kept: tuple[Values, ...]
    output: tuple[Values, ...]
    all_in_flight: NDArray[np.bool_]

    @property
    def moments(self) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
        """Both, in the order of moments."""
        return self.kept, self.output


def activations_of(
    columns: Columns,
    owned: Sequence[PipelineRank],
    places: Sequence[int],
    output_bytes: float,
    numerics: Numerics,
) -> Activations:
    """Return the bytes of activations at every moment, in the order of [Note: phases of memory].

    Args:
        columns: The candidates.
        owned: What some pipeline ranks own.
        places: Which ranks these are.
        output_bytes: What the model returns for one row.
        numerics: Dtypes.
    """
    rows = columns.rows_of_part
    kept, again = _kept(columns, owned)
    in_flight, of_all = _in_flight(columns, places)
    # Passes are spread over the virtual stages.
    one = kept / of_each(owned, lambda own: len(own.stages))

    def widest(own: PipelineRank) -> float:
        return max((p.widest_bytes for p, _ in own.kinds), default=0.0)

    def sent_to_experts(own: PipelineRank) -> float:
        return max((p.part.sent_bytes for p, _ in own.kinds), default=0.0)

    block = of_each(owned, lambda own: _largest_block(own, lambda p: p.saved_bytes)) * rows
    # Of a block's backward: the gradients of two of its widest tensors; of experts, what came from
    # other ranks and what they made of it.
    made = 2 * of_each(owned, widest) * rows
    if columns.layout.ep > 1:
        made = made + 2 * of_each(owned, sent_to_experts) * rows
    behind = of_each(owned, lambda own: sum(p.saved_bytes for p in own.parts if p.is_last)) * rows
    before = of_each(owned, _before_blocks) * rows
    all_kept = one * in_flight
    # The loss is through by then, and what it kept is free. What runs again is there whole.
    of_last = all_kept - behind + again + made
    of_first = one * (in_flight - 1) + before + block + made
    # Logits, their gradient and that of their logarithms. A caller has those of one pass. Where
    # they are cut, their exponentials are there, too, in forward and in backward.
    logits = _logits(columns, owned, places, output_bytes)
    is_cut = of_each(owned, lambda own: any(p.keeps_cut for p in own.parts))
    returned = np.where(columns.parts == 1, logits, 0.0)
    wide = max(1.0, _LOSS_ITEMSIZE / numerics.compute_itemsize)
    nothing = np.zeros_like(logits)
    return Activations(
        kept=(all_kept, all_kept, of_last, of_first, nothing),
        output=(
            (1 + is_cut) * logits,
            returned + (2 + is_cut) * wide * logits,
            returned,
            returned,
            returned,
        ),
        all_in_flight=in_flight >= of_all,
    )


def _kept(columns: Columns, owned: Sequence[PipelineRank]) -> tuple[Values, Values]:
    """Return what a micro-batch keeps, and what a block that runs again makes of it besides."""
    full, in_part = columns.recomputes, columns.keeps_products
    kept = of_each(owned, lambda own: own.saved_bytes)
    kept = (
        kept
        - full * (kept - of_each(owned, lambda own: own.recomputed_bytes))
        - in_part * (kept - of_each(owned, lambda own: own.selective_bytes))
    )
    rest = of_each(
        owned, lambda own: _largest_block(own, lambda p: p.saved_bytes - p.selective_bytes)
    )
    whole = of_each(owned, lambda own: _largest_block(own, lambda p: p.saved_bytes))
    again = np.where(full > 0, whole, np.where(in_part > 0, rest, 0.0))
    return kept * columns.rows_of_part, again * columns.rows_of_part


def _largest_block(own: PipelineRank, nbytes: Callable[[LocalPart], float]) -> float:
    return max((nbytes(p) for p, _ in own.kinds if p.is_block), default=0.0)


def _before_blocks(own: PipelineRank) -> float:
    return sum(p.saved_bytes for p in own.parts if not p.is_block and not p.is_last)


def _logits(
    columns: Columns, owned: Sequence[PipelineRank], places: Sequence[int], output_bytes: float
) -> Values:
    """Return the bytes of the output of a micro-batch, on the rank of the last stage."""
    # Of cut logits a rank has its part.
    parts = of_each(owned, lambda own: next((p.tp for p, _ in own.kinds if p.keeps_cut), 1))
    is_last = np.array([[rank == columns.layout.pp - 1] for rank in places])
    return np.where(is_last, output_bytes / parts, 0.0) * columns.rows_of_part


def _in_flight(columns: Columns, places: Sequence[int]) -> tuple[Values, Values]:
    """Return how many passes wait for their backward at most, and how many there are."""
    counts, place = np.unique(columns.microbatches, return_inverse=True)
    p, v = columns.layout.pp, columns.first.virtual_stages
    schedule = columns.first.schedule
    waiting = np.array(
        [
            [passes_in_flight(schedule, rank, p, v, int(count)) for count in counts]
            for rank in places
        ],
        dtype=np.float64,
    )[:, place]
    return waiting, (columns.parts * v)[None, :].astype(np.float64)


def passes_in_flight(schedule: str, rank: int, p: int, v: int, m: int) -> int:
    """Return how many forward passes of one stage wait for their backward at most.

    ``gpipe`` all; ``1f1b`` one for each stage behind and itself; interleaved
    2 (p - rank - 1) + (v - 1) p + 1 (Narayanan et al. 2021); others as many as their simulation.

    Args:
        schedule: Of the pipeline.
        rank: Of it.
        p: Its size.
        v: Stages of each rank.
        m: Micro-batches of a step.
    """
    if schedule not in USUAL_SCHEDULES:
        return _simulated(schedule, p, v, m)[rank]
    if schedule == "gpipe":
        return m
    if v == 1:
        return min(m, p - rank)
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)


@functools.cache
def _simulated(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    return simulate_schedule(schedule, size=p, virtual_stages=v, microbatches=m).peak_activations
