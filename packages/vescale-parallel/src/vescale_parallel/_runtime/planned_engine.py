"""The engine that a plan asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._cross_replica.batch import BatchRows
from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._cross_replica.context.reach.seen_by_hooks import FindsSlices, OverSequence
from vescale_parallel._cross_replica.context.slices import ContextProcesses
from vescale_parallel._data_parallel.zero_state import ZeroState
from vescale_parallel._loss.output import loss_called
from vescale_parallel._loss.returned import ReturnedLosses
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._mesh.mesh import axis_group
from vescale_parallel._parameters.shard_model import torch_dtype
from vescale_parallel._pipeline.buffers import StageBuffers
from vescale_parallel._pipeline.runner import Pipeline
from vescale_parallel._pipeline.stage_assignment import StageMap
from vescale_parallel._pipeline.stage_module import Staging
from vescale_parallel._pipeline.step import PipelineStep
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._rng.stage_draws import StageDraws
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.hooks.agreed import AgreedHooks
from vescale_parallel._tensor_parallel.hooks.axis import Axis
from vescale_parallel._tensor_parallel.hooks.kept import FindsParts, KeptByForward
from vescale_parallel._tensor_parallel.hooks.whole_activations import OverTensorParallel
from vescale_parallel._tensor_parallel.hooks.whole_for_hooks import WholeForHooks
from vescale_parallel._tensor_parallel.vocabulary.distributed_logits import DistributedLogits
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import LiftPlain

from .accumulation import AccumulatedStep
from .arguments import Arguments
from .compared.same_inputs import SameInputs
from .engine import Engine, ProvesCalls
from .optimizer.own_steps import take_local_tensors
from .outside import KnownModules
from .where import name_modules_of


def planned_engine(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    parameters: ZeroState,
    proofs: Sequence[ProvesCalls | None],
    rows: BatchRows,
    rng: ShardedRng,
    lift: LiftPlain | None,
    stages: StageMap | None,
    staging: Staging,
    draws: StageDraws | None,
    context: dist.ProcessGroup | None,
) -> Engine:
    """Return what runs the calls of a model that was changed as a plan says."""
    ranks = DataRanks(mesh, plan.context_parallel.size)
    logits = DistributedLogits(
        None if lift is None else mesh["tp"], lift, plan.tensor_parallel.communication
    )
    inputs = SameInputs(model, mesh, context, is_delayed=mesh.device_type == "cuda")
    parameters.while_backward = logits.declared
    step = None
    if stages is not None and draws is not None:
        blocks, shared = (stages.starts, len(stages.blocks)), (ranks.total, ranks.size)
        pipeline = Pipeline(plan, mesh, staging, *blocks, *shared, draws)
        buffers = StageBuffers(model, pipeline.group_of("F"), staging, summed=rows.summed.names)
        step = PipelineStep(
            model, pipeline, parameters.params, buffers, parameters.finish_backward, parameters
        )
    accumulation = None
    if stages is None and plan.num_microbatches > 1:
        accumulation = AccumulatedStep(
            num_microbatches=plan.num_microbatches,
            model=model,
            device=mesh.device_type,
            parameters=parameters,
            ranks=ranks,
            rng=rng,
            staging=staging,
            buffers=StageBuffers(model, None, summed=rows.summed.names),
            loss_of=loss_called(plan.pipeline_parallel.loss),
        )
    name_modules_of(model)
    take_local_tensors()
    return Engine(
        mesh=mesh,
        parameters=parameters,
        data_ranks=ranks,
        arguments=Arguments(model, mesh.device_type),
        inputs=inputs,
        known=KnownModules(model, parameters.params),
        proofs=[each for each in proofs if each is not None],
        rows=rows,
        rng=rng,
        logits=logits,
        losses=ReturnedLosses(),
        pipeline=step,
        accumulation=accumulation,
        keeps_caches=step is None and context is None,
        input_dtype=torch_dtype(plan.precision.param) if plan.precision.cast_inputs else None,
    )


def planned_hooks(
    model: nn.Module,
    mesh: DeviceMesh,
    boundary: Boundary | None,
    layouts: FindsParts | None,
    slices: FindsSlices | None,
    sliced: SlicedBlocks | None,
    context: dist.ProcessGroup | None,
) -> list[ProvesCalls]:
    """Return what gives hooks and programs whole activations. Every rank must call this.

    Args:
        model: The model, changed as a plan says.
        mesh: The plan's.
        boundary: That activations cross between tensor-parallel ranks.
        layouts: Knows how they lie over these.
        slices: Knows how they lie over ranks that share a sequence.
        sliced: Blocks that compute on slices.
        context: The ranks that share a sequence.
    """
    axes: list[tuple[Axis, AgreedHooks]] = []
    found: list[ProvesCalls] = []
    group = axis_group(mesh, "tp")
    if group is not None and boundary is not None and layouts is not None:
        axes.append((OverTensorParallel(boundary.ranks, layouts), AgreedHooks(group)))
        found.append(KeptByForward(model, mesh["tp"], boundary.ranks, layouts))
    if context is not None and sliced is not None and slices is not None:
        ranks = ContextProcesses(context)
        axes.append((OverSequence(ranks, slices, sliced), AgreedHooks(context)))
    return [*found, WholeForHooks(model, axes)] if axes else found
