"""What is predicted of one candidate, as data."""

from __future__ import annotations

from dataclasses import asdict

from vescale_planner._prices.memory import Memory
from vescale_planner._search.search import Search
from vescale_planner._space.candidates import Candidate
from vescale_planner.cluster import Cluster
from vescale_planner.prediction import Breakdown, Prediction, RankMemory


def prediction(candidate: Candidate, search: Search, assumptions: tuple[str, ...]) -> Prediction:
    """Return what is predicted of a candidate."""
    cost, workload, cluster = search.score(candidate).cost, search.workload, search.cluster
    layout = candidate.layout
    devices = layout.tp * layout.cp * layout.pp * layout.dp
    samples = layout.dp * candidate.rows
    peak = cluster.flops_per_second_of(search.numerics.compute_itemsize)
    return Prediction(
        step_seconds=cost.step,
        tokens_per_second_per_device=samples * workload.tokens / (cost.step * devices),
        # Backward takes twice the flops of forward.
        mfu=3 * samples * workload.flops / (cost.step * devices * peak),
        memory=tuple(_of_rank(each, cluster) for each in search.memories(candidate)),
        breakdown=Breakdown(
            matrix_products=cost.matrix,
            attention=cost.attention,
            memory_bound=cost.memory_bound,
            tensor_parallel=cost.tensor_parallel,
            context_parallel=cost.context_parallel,
            expert_parallel=cost.expert_parallel,
            pipeline_parallel=cost.hand_over,
            data_parallel=cost.data_parallel,
            bubble=cost.bubble,
            optimizer=cost.optimizer,
        ),
        assumptions=assumptions,
    )


def _of_rank(memory: Memory, cluster: Cluster) -> RankMemory:
    return RankMemory(
        **asdict(memory),
        fragmentation=(cluster.fragmentation - 1) * memory.total,
        reserved=cluster.reserved_bytes,
    )
