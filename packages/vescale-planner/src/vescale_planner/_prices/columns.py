"""Candidates as columns of numbers, so that thousands are priced by one formula at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vescale_planner._partition import PipelineRank
from vescale_planner._space.candidates import Candidate
from vescale_planner._space.layouts import Layout

Values = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a plan says of dtypes, and what the optimizer keeps.

    Attributes:
        states: Tensors of a parameter's size that the optimizer keeps.
        compute_itemsize: Bytes of an element in forward and backward.
        casts: Whether parameters are cast to what has them, from the dtype that they are kept in.
        reduce_itemsize: Of a gradient while it is summed; None as in backward.
        keeps_buffers: As ``Cluster`` says.
        sums_first: Whether a pipeline adds up the gradients of micro-batches before it reduces.
    """

    states: int
    compute_itemsize: int
    casts: bool = False
    reduce_itemsize: int | None = None
    keeps_buffers: bool = False
    sums_first: bool = True


@dataclass(frozen=True)
class Columns:
    """Candidates that are of one kind, see :func:`kind_of`: one array a field.

    Attributes:
        first: Of the candidates, for all that they share.
        zero_stage: Of each, as the next ones.
        replicate: Copies of the sharded state.
        microbatches: Of a pipeline.
        accumulation: Times that those run.
        rows: Of a replica in a step.
        recomputes: Share of blocks that run again in backward.
        keeps_products: Share that does but for products of matrices and attention.
        reshards: Whether ZeRO 3 frees blocks between forward and backward.
        shares_state: Whether copies share out the optimizer state.
    """

    first: Candidate
    zero_stage: Counts
    replicate: Counts
    microbatches: Counts
    accumulation: Counts
    rows: Counts
    recomputes: Values
    keeps_products: Values
    reshards: NDArray[np.bool_]
    shares_state: NDArray[np.bool_]

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes, which all share."""
        return self.first.layout

    @cached_property
    def parts(self) -> Counts:
        """What a replica's rows are cut into, run one after the other."""
        return self.microbatches * self.accumulation

    @cached_property
    def rows_of_part(self) -> Values:
        """Rows of one micro-batch, or the part of a row that a rank has."""
        return self.rows / self.parts / self.layout.cp

    @cached_property
    def shard(self) -> Counts:
        """Ranks that share one copy of the sharded state."""
        ranks = self.layout.dp * self.layout.cp // np.maximum(self.replicate, self.layout.ep)
        return np.where(self.zero_stage > 0, ranks, 1)

    @cached_property
    def stride_of_shards(self) -> Counts:
        """How far apart in the world ranks are that shard: next to each other if they gather.

        Else those that share experts are (``vescale_parallel.ParallelPlan.axes``).
        """
        return self.layout.tp * np.where(self.zero_stage == 3, 1, self.layout.ep)

    @cached_property
    def stride_of_experts(self) -> Counts:
        """Likewise those that share experts."""
        return self.layout.tp * np.where(self.zero_stage == 3, self.shard, 1)

    @cached_property
    def state_shard(self) -> Counts:
        """Ranks that share one copy of the optimizer state."""
        return np.where(self.shares_state, self.layout.dp * self.layout.cp, self.shard)

    @cached_property
    def passes_of_block(self) -> Values:
        """Forwards that a block takes in time: backward is two, recomputation one."""
        return 3 + self.recomputes

    @cached_property
    def runs_again(self) -> Values:
        """Share of blocks that run again what is no product of matrices and no attention."""
        return self.recomputes + self.keeps_products


def kind_of(candidate: Candidate) -> Hashable:
    """Return what candidates share that are priced together."""
    return (
        candidate.layout, candidate.schedule, candidate.virtual_stages, candidate.prefetch,
        candidate.reduction, candidate.offload, candidate.attends,
    )  # fmt: skip


def columns_of(candidates: Sequence[Candidate]) -> Columns:
    """Return candidates of one kind as columns, in their order."""
    return Columns(
        candidates[0],
        np.array([each.zero_stage for each in candidates]),
        np.array([each.replicate for each in candidates]),
        np.array([each.microbatches for each in candidates]),
        np.array([each.accumulation for each in candidates]),
        np.array([each.rows for each in candidates]),
        np.array([each.recomputed * (each.recompute == "full") for each in candidates]),
        np.array([each.recomputed * (each.recompute == "selective") for each in candidates]),
        np.array([each.reshards for each in candidates]),
        np.array([each.shares_state for each in candidates]),
    )


def of_each(ranks: Sequence[PipelineRank], number_of: Callable[[PipelineRank], float]) -> Values:
    """Return a number of each pipeline rank, to be combined with one of each candidate."""
    return np.array([[number_of(rank)] for rank in ranks], dtype=np.float64)  # (ranks, 1)
