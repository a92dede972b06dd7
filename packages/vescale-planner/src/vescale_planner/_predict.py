"""Price one plan, whoever wrote it: the numbers that the search compares plans by."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale_parallel import ParallelPlan, planned_experts

from ._experts import EVEN_EXPERTS
from ._explanations.predicted import prediction
from ._prices.memory import UNTIMED_OFFLOAD, optimizer_states
from ._search.search import Search
from ._space.candidates import Candidate
from ._space.layouts import Layout
from ._space.recomputation import Recompute, priced_recompute
from ._workload import Workload, computed_in, itemsize_of, workload_of
from .cluster import Cluster, as_cluster
from .prediction import Prediction

# What of a plan changes its price besides the candidate that it stands for.
_PRICED = (
    "tensor_parallel.sequence",
    "precision.param",
    "precision.reduce",
    "pipeline_parallel.split_points",
)


def predict(
    model: nn.Module,
    plan: ParallelPlan,
    cluster: Cluster | str | None = None,
    *,
    example_batch: Any = None,
    optimizer: str | type = "adamw",
) -> Prediction:
    """Predict what one optimizer step of a plan takes. Communicates and allocates nothing.

    The plan may be written by hand, need more memory than there is, or ask for context
    parallelism, which ``generate_plan`` prices and does not choose.

    Args:
        model: Real, on the meta device, or deferred.
        plan: Of any number of ranks.
        cluster: The machines, or their name, one of ``Cluster.names()``; by default what this
            one has.
        example_batch: As for ``generate_plan``. Without one flops and activations are estimated.
        optimizer: The optimizer's name or class, for its memory.

    Raises:
        ValueError: If the model has no such stages, or no experts that ranks can share as the
            plan has it.

    Example:
        >>> found = predict(nn.Linear(8, 8), ParallelPlan(), "h200")
        >>> found.step_seconds > 0, len(found.memory)
        (True, 1)
    """
    planned_experts(plan, model)
    cluster = as_cluster(cluster, plan.world_size)
    workload = workload_of(model, example_batch, plan.pipeline_parallel.block_calls)
    workload = computed_in(workload, itemsize_of(plan.precision.param, workload.itemsize))
    notes = list(workload.assumptions)
    if plan.data_parallel.offload != "none":
        notes.append(UNTIMED_OFFLOAD)
    if plan.expert_parallel.size > 1:
        notes.append(EVEN_EXPERTS)
    candidate = _candidate(plan, workload, notes)
    search = _search(plan, model, workload, cluster, optimizer_states(optimizer), notes)
    _check_stages(plan, workload)
    return prediction(candidate, search, tuple(notes))


def _candidate(plan: ParallelPlan, workload: Workload, notes: list[str]) -> Candidate:
    data, pipeline = plan.data_parallel, plan.pipeline_parallel
    recompute, recomputed = _recompute(plan, workload, notes)
    return Candidate(
        layout=Layout(
            plan.tensor_parallel.size,
            pipeline.size,
            data.size,
            plan.context_parallel.size,
            plan.expert_parallel.size,
        ),
        zero_stage=data.zero_stage,
        replicate=data.replicate_size,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        microbatches=pipeline.microbatches,
        recompute=recompute,
        recomputed=recomputed,
        rows=_rows(plan, workload, notes),
        accumulation=plan.batch.gradient_accumulation,
        prefetch=data.prefetch,
        reduction=data.reduction,
        reshards=data.reshard_after_forward is not False,
        offload=data.offload,
        shares_state=data.replicate_zero_stage == 1,
        attends=plan.context_parallel.method,
    )


def _recompute(
    plan: ParallelPlan, workload: Workload, notes: list[str]
) -> tuple[Recompute, float]:
    priced = priced_recompute(plan.recompute, workload.block_names)
    if priced is None:
        notes.append(
            "blocks of which some run again whole and some selectively are priced as if all kept "
            "all activations: they need less memory, and more time"
        )
    return priced or ("none", 1.0)


def _rows(plan: ParallelPlan, workload: Workload, notes: list[str]) -> int:
    """Return the rows of a data-parallel rank."""
    size = plan.batch.global_size
    if size is None and plan.estimate is not None:
        size = plan.estimate.samples
    if size is not None:
        return size // plan.data_parallel.size
    parts = plan.num_microbatches
    rows = -(-(workload.rows or 1) // parts) * parts
    notes.append(
        f"every data-parallel rank gets {rows} rows a step; give the plan batch.global_size to "
        "say otherwise"
    )
    return rows


def _search(
    plan: ParallelPlan,
    model: nn.Module,
    workload: Workload,
    cluster: Cluster,
    states: int,
    notes: list[str],
) -> Search:
    """Return what scores candidates, with the plan's own sharding of layers."""
    described = plan.dotted()
    constraints = {key: described[key] for key in _PRICED if key in described}
    pipeline, tensor = plan.pipeline_parallel, plan.tensor_parallel
    method = "uniform" if pipeline.split_method == "manual" else pipeline.split_method
    search = Search(model, workload, cluster, constraints, states, method)
    sharding = dict(tensor.sharding_plan)
    if tensor.size > 1 and not sharding:
        sharding = _assumed_sharding(model, workload)
        notes.append("the plan has no sharding_plan: all matrices and the logits are sharded")
    search.shard(tensor.size, sharding)
    return search


def _assumed_sharding(model: nn.Module, workload: Workload) -> dict[str, str]:
    """Return placements of all matrices; which dim of one makes no difference to its price."""
    found = {name: "Shard(0)" for name, p in model.named_parameters() if p.dim() > 1}
    head = [p for p in (*workload.after.parameters, *workload.tied) if p.fqn in found]
    if workload.blocks and head:
        found[f"{head[-1].fqn.rpartition('.')[0]}.<out>"] = "Shard(-1)"
    return found


def _check_stages(plan: ParallelPlan, workload: Workload) -> None:
    stages = plan.pipeline_parallel.num_stages
    if stages == 1:
        return
    if workload.no_pipeline:
        raise ValueError(workload.no_pipeline)
    if stages > len(workload.blocks):
        raise ValueError(
            f"expected at most {len(workload.blocks)} pipeline stages, one per block, got {stages}"
        )
    unknown = set(plan.pipeline_parallel.split_points) - set(workload.block_names)
    if unknown:
        raise ValueError(
            f"pipeline_parallel.split_points: {min(unknown)!r} is no block; blocks are "
            f"{workload.block_names[0]!r} to {workload.block_names[-1]!r}"
        )
