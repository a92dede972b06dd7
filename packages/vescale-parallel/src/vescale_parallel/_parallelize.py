"""The entry point: from a plan, a model and an ordinary loop to an nD-parallel one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vescale_dtensor import announced_failures, package_logger

from ._auto_sharding.planned import shard_as_planned
from ._cross_replica.batch import BatchRows, exchange_over
from ._cross_replica.call_guard import RowGuard, row_guard
from ._cross_replica.context.blocks import SlicedBlocks
from ._cross_replica.context.guard import ContextGuard
from ._cross_replica.context.slices import ContextProcesses
from ._cross_replica.regions.row_regions import RowRegions
from ._data_parallel.data.loader import ParallelLoader
from ._data_parallel.planned import planned_zero_state
from ._expert_parallel.dispatch import dispatch
from ._expert_parallel.dispatch_listed import ListDispatch
from ._expert_parallel.expert_draws import ExpertDraws
from ._expert_parallel.find import planned_experts
from ._expert_parallel.found import FoundExperts
from ._expert_parallel.load import count_once
from ._loss.kernels import leave_in_blocks
from ._loss.loss_fn import LossFn, check_loss_fn, give_loss
from ._mesh.agreement import barrier, check_agreement
from ._mesh.data_ranks import DataRanks
from ._mesh.mesh import (
    axis_group,
    axis_rank,
    axis_size,
    batch_mesh,
    build_mesh,
    context_group,
    cuts_rows_in_order,
    data_groups,
    rows_mesh,
    second_group,
    state_mesh,
)
from ._mesh.process_group import check_host_collectives, start_process_group
from ._model.blocks import blocks_of
from ._model.inputs import example_from, example_of
from ._model.signature import check_signature, described_structure
from ._parameters.rank_zero import Construction, take_model_of_rank_zero
from ._parameters.shard_model import Read, move_buffers, read_real, shard_parameters, torch_dtype
from ._pipeline.call_order import places_seen, with_stages
from ._pipeline.cuts.placeholders import placeholder
from ._pipeline.layer_outputs import give_no_layers
from ._pipeline.stage_assignment import StageMap, stage_map
from ._pipeline.stage_module import Staging, stage_model
from ._plan.plan import ParallelPlan
from ._plan.recomputation import recompute_by_block
from ._plan.supported import check_supported
from ._rng.call_forms import DrawForms
from ._rng.known_draws import Place
from ._rng.planned_context import planned_context
from ._rng.sharded_rng import ShardedRng
from ._rng.stage_draws import StageDraws
from ._runtime.accumulation import let_count
from ._runtime.checks import check_arguments, described_arguments
from ._runtime.compiled.blocks import compile_blocks
from ._runtime.model_copies import ModelCopies
from ._runtime.module import give_engine
from ._runtime.optimizer.kinds import declared_block
from ._runtime.optimizer.user_functions import OptimizerFn, train_parts
from ._runtime.outside import refuse_parts
from ._runtime.planned_engine import planned_engine, planned_hooks
from ._runtime.recomputation.recompute import recompute_blocks
from ._runtime.tell_result import tell_result
from ._tensor_parallel.apply import install
from ._tensor_parallel.async_reduce import make_beside
from ._tensor_parallel.communicators import ProcessRanks
from ._tensor_parallel.conversion_hooks import shard_in_forward
from ._tensor_parallel.conversions import Boundary
from ._tensor_parallel.explain import Applied, said_whole
from ._tensor_parallel.invariant.boundary import InvariantBoundary
from ._tensor_parallel.invariant.install import install_invariant
from ._tensor_parallel.invariant.tree import OneRank, TreeRanks
from ._tensor_parallel.tensor_sharding import TensorSharding
from ._tensor_parallel.vocabulary.vocab_parallel import LiftPlain, keep_sharded

_log = package_logger("vescale.parallel")


def parallelize(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: OptimizerFn | None = None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
    dataset: Any | None = None,
    *,
    loss_fn: LossFn | None = None,
    read: Read = read_real,
    construction: Construction | None = None,
) -> Any:
    """Make a model, and what trains it, run as a plan says. Every rank must call this.

    The model is changed in place: it keeps its class, names and forward, its parameters
    become DTensors of global shape, and calls of it take this rank's part of a batch. Starts
    the process group from torchrun's environment if nobody did.

    Args:
        plan: What to do.
        model: Any module; on one device or deferred. A pipeline needs less memory for a forward
            that returns its loss.
        optimizer_fn: Called on the parallelized model; returns a torch optimizer. Or the class
            of one, which is called on the model's parameters.
        lr_scheduler_fn: Called on the optimizer.
        dataset: A map-style or iterable data set, or a ready ``DataLoader`` of global batches;
            becomes a :class:`ParallelLoader`.
        loss_fn: Computes the loss from what forward returns and the targets, for a model that
            does not. A call with ``target=...`` returns it; any other call, the output.
        read: Returns the values of a box of one of the model's tensors.
        construction: How those values come about; None of a model that has its own.

    Returns:
        The model; or a tuple of the model, optimizer, scheduler and loader, one for each
        thing that was given, in that order.

    Raises:
        ValueError: If the plan does not fit the world size or the model, or ranks were given
            different plans or models. Nothing has been changed then, unless it is about what
            ``optimizer_fn`` returned.
        TypeError: If an argument is of the wrong kind.
    """
    start_process_group()
    with announced_failures():
        check_arguments(plan, model, optimizer_fn, lr_scheduler_fn)
        if loss_fn is not None:
            check_loss_fn(model, loss_fn)
        check_agreement(
            plan=plan.described(),
            model=described_structure(model),
            arguments=described_arguments(
                construction,
                optimizer_fn=optimizer_fn,
                lr_scheduler_fn=lr_scheduler_fn,
                dataset=dataset,
                loss_fn=loss_fn,
            ),
        )
        plan.check_world_size(dist.get_world_size())
        take_model_of_rank_zero(model, construction)
        check_signature(plan, model)
        check_supported(plan, model)
        if plan.data_parallel.offload != "none":
            check_host_collectives()
        _log.info("parallelizing %s on %d ranks: %s", type(model).__name__, plan.world_size, plan)
        undo = None if loss_fn is None else give_loss(model, loss_fn)
        try:
            return _carry_out(plan, model, optimizer_fn, lr_scheduler_fn, dataset, read)
        except Exception:
            if undo is not None:
                undo()
            raise


def _carry_out(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: OptimizerFn | None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None,
    dataset: Any | None,
    read: Read,
) -> Any:
    batch = example_of(model) if dataset is None else example_from(dataset)
    rows = dataset.batch_size if isinstance(dataset, DataLoader) else None
    decided = with_stages(plan, model, batch, global_size=rows)
    barrier()  # a data set that failed on one rank; what comes next may take long
    if decided is not plan:
        keys = "pipeline_parallel.split_points", "pipeline_parallel.block_calls"
        check_agreement(stages={key: decided.described()[key] for key in keys})
        plan = decided
    block = declared_block()  # of copies, too, whatever is declared by then

    def change(copied: nn.Module, read: Read) -> None:
        _change(plan, copied, batch, None, read, block)

    copies = ModelCopies(model, change)
    loader = _change(plan, model, batch, dataset, read, block)
    object.__setattr__(model, "_vescale_copies", copies)
    parts = train_parts(model, optimizer_fn, lr_scheduler_fn)
    parts += [loader] * (loader is not None)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _change(
    plan: ParallelPlan, model: nn.Module, batch: Any, dataset: Any | None, read: Read, block: int
) -> ParallelLoader | None:
    """Change a model in place, in shards of whole blocks; return the loader of its data set."""
    # What is decided on the whole model, before any of it is changed.
    experts = planned_experts(plan, model)
    whole = said_whole(plan.reasons)
    sharding, proofs, left_whole, chunked = shard_as_planned(plan, model, batch, whole)
    sequence = planned_context(plan, model, batch)
    stages = stage_map(plan, model, places_seen(plan, model, batch))
    blocks = blocks_of(model)
    run_here, units = _blocks_here(plan, stages, blocks)
    modes = recompute_by_block(plan.recompute, tuple(dict.fromkeys((*blocks, *run_here))))
    mesh = build_mesh(plan)
    row_guard, forms = _guards_of_calls(plan, model, mesh, batch, sharding)
    loader = None if dataset is None else ParallelLoader(plan, dataset, mesh)
    if row_guard is not None and loader is not None:
        row_guard.is_rows_first, row_guard.are_rows_apart = loader.gave, loader.put_apart
    # The model, changed in the order of [Note: who wraps a module], innermost first.
    param_dtype, staging = torch_dtype(plan.precision.param), Staging(sharding=sharding)
    draws = None if stages is None else _stage(plan, model, mesh, stages, staging)
    if stages is None and plan.num_microbatches > 1:
        let_count(model, staging, param_dtype)
    stages_of = (lambda _: (0,)) if stages is None else stages.stages_of
    own, on = experts.parameters(model, plan.expert_parallel.size), state_mesh(plan, mesh)
    params = shard_parameters(
        plan, model, on, sharding, units, stages_of, placeholder, read, own, block=block
    )
    expert_draws, backend = ExpertDraws(), plan.compile_backend
    lists = dispatch(model, experts, mesh, expert_draws)
    move_buffers(model, read)
    boundary, lift = _add_collectives(plan, model, mesh, sharding, chunked)
    if plan.compile == "blocks":
        compile_blocks(model, run_here, backend, lambda fqn: rows.are_coupled_in(fqn), boundary)
    sliced, context = _slice_blocks(plan, model, mesh, sequence, staging, (sharding, boundary))
    rows = _batch_rows(plan, mesh, row_guard, lift, sliced, experts, lists)
    rng = expert_draws.of_model = _add_draws(plan, model, mesh, boundary, forms, sliced)
    for param in params:
        param.refuse_calls_outside()
    as_now = rng.as_now if sliced is None else sliced.as_now(rng.as_now)
    as_now = as_now if boundary is None else boundary.as_now(as_now)
    recompute_blocks(model, run_here, modes, as_now, plan.recompute_keep, rows.prepare)
    parameters = planned_zero_state(plan, model, mesh, params, units)
    leave_in_blocks(model, run_here)
    hooks = planned_hooks(model, mesh, boundary, proofs, sequence, sliced, context)
    parts = (parameters, (proofs, sequence, *hooks), rows, rng, lift, stages, staging, draws)
    engine = planned_engine(plan, model, mesh, *parts, context)
    engine.completed = engine.completed if sequence is None else sequence.completed
    if plan.data_parallel.size > 1 or stages is not None or sliced is not None:
        refuse_parts(model, blocks, lambda: engine.is_running)
    if lift is not None:
        model.register_forward_hook(engine.logits.plain_results, prepend=True)
    if sliced is not None:
        sliced.behind.returns_all |= plan.pipeline_parallel.outputs is not None
        sliced.behind.finish_calls(model, rows.are_coupled, stages and stages.blocks[-1])
    if loader is not None:
        engine.is_at_uneven = lambda: loader.is_at_uneven
    give_engine(model, engine)
    object.__setattr__(model, "_vescale_sharding", Applied(sharding, boundary, left_whole))
    tell_result(plan, mesh, params, stages)
    return loader


def _stage(
    plan: ParallelPlan, model: nn.Module, mesh: DeviceMesh, stages: StageMap, staging: Staging
) -> StageDraws:
    """Let modules be answered on other stages; return what gives each its random numbers."""
    dtype = torch_dtype(plan.precision.param)
    input_dtype = dtype if plan.precision.cast_inputs else None
    ranks = DataRanks(mesh, plan.context_parallel.size)
    draws = StageDraws(model, stages.stages_of_calls, mesh, ranks, dtype, input_dtype)
    stage_model(model, stages, staging, dtype)
    draws.borders.install(model, stages.stages_of_calls)
    give_no_layers(model)
    return draws


def _blocks_here(
    plan: ParallelPlan, stages: StageMap | None, blocks: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the blocks that are run, and those whose parameters travel together."""
    if stages is None:
        return blocks, blocks
    placement = plan.pipeline_parallel.placement
    return stages.distinct_blocks, stages.blocks_of_one_rank(placement)


def _slice_blocks(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    sequence: ContextGuard | None,
    staging: Staging,
    parts: tuple[TensorSharding, Boundary | None],
) -> tuple[SlicedBlocks | None, dist.ProcessGroup | None]:
    """Have blocks compute on slices; return them, and the ranks that share a sequence."""
    group = context_group(mesh, plan.context_parallel.size)
    if sequence is None or group is None:
        return None, None
    between, ranks = shard_in_forward(model, *parts), ContextProcesses(group)
    sliced = sequence.install(model, ranks, compiled=plan.compile != "none", between=between)
    staging.enters = sliced.enter
    count_once(model, lambda: sliced.repeats_tokens)
    return sliced, group


def _add_draws(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    boundary: Boundary | None,
    forms: DrawForms | None,
    sliced: SlicedBlocks | None,
) -> ShardedRng:
    lengths = {} if boundary is None else boundary.lengths
    known = None if forms is None else forms.known
    rng = ShardedRng(_place(plan, mesh), lengths, known, sliced)
    if forms is not None or sliced is not None:
        rng.install(model, compiled=plan.compile != "none")
    return rng


def _guards_of_calls(
    plan: ParallelPlan, model: nn.Module, mesh: DeviceMesh, batch: Any, sharding: TensorSharding
) -> tuple[RowGuard | None, DrawForms | None]:
    """Return what knows, of every form of call, where rows are coupled and what is drawn."""
    exchange = exchange_over(data_groups(mesh))
    pipelined, guard = plan.pipeline_parallel.size > 1, row_guard(plan, model, exchange)
    # Stages of a pipeline draw for whole micro-batches, see [Note: draws of a pipeline].
    num_parts = 1 if pipelined else plan.data_parallel.size * plan.num_microbatches
    if num_parts * plan.tensor_parallel.size == 1:
        return guard, None
    looks, has_parts = guard or RowGuard(model, exchange), num_parts > 1
    return guard, DrawForms(model, looks, batch, sharding, exchange, has_parts=has_parts)


def _add_collectives(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: TensorSharding,
    chunked: TensorSharding | None,
) -> tuple[Boundary | None, LiftPlain | None]:
    """Add tensor parallelism's collectives to a model that holds this rank's parameters."""
    group = axis_group(mesh, "tp")
    pipelined = plan.pipeline_parallel.size > 1
    if chunked is not None:
        ranks = OneRank() if group is None else TreeRanks(group)
        invariant = InvariantBoundary(ranks, plan.numerics_chunks, even=pipelined)
        install_invariant(model, chunked, invariant)
        if not pipelined:
            invariant.watch(model, chunked.sequence_ends())
        return invariant, None if group is None else LiftPlain(mesh["tp"])
    if group is None:
        return None, None
    lift = LiftPlain(mesh["tp"])
    keep_cut = functools.partial(keep_sharded, mesh=mesh["tp"], lift=lift)
    parts = plan.tensor_parallel.overlap
    beside = make_beside(ProcessRanks(second_group(mesh, "tp"))) if parts > 1 else None
    boundary = Boundary(ProcessRanks(group), even=pipelined, beside=beside, num_parts=parts)
    install(model, sharding, boundary, keep_cut=keep_cut, with_ends=False)
    if not pipelined:
        boundary.watch(model, sharding.sequence_ends())
    return boundary, lift


def _batch_rows(
    plan: ParallelPlan,
    mesh: DeviceMesh,
    guard: RowGuard | None,
    lift: LiftPlain | None,
    sliced: SlicedBlocks | None,
    experts: FoundExperts,
    lists: Sequence[ListDispatch],
) -> BatchRows:
    regions = None
    context = plan.context_parallel.size
    if plan.data_parallel.size > 1 and plan.pipeline_parallel.size == 1:
        tp_mesh = mesh["tp"] if axis_size(mesh, "tp") > 1 else None
        is_own = tp_mesh is None and context == 1 and cuts_rows_in_order(mesh)
        with_tp = None if is_own else batch_mesh(plan)
        of_rows = rows_mesh(mesh if with_tp is None else with_tp)
        stacked = {each.fqn: each for each in experts.stacked}
        regions = RowRegions(of_rows, tp_mesh, with_tp, lift, stacked, experts.in_lists)
        for each in lists:
            each.rows_of_all = regions
    num_parts = plan.data_parallel.size * plan.num_microbatches
    ranks, stacks = DataRanks(mesh, context), () if sliced is None else sliced.stacks
    return BatchRows(guard, regions, ranks, data_groups(mesh), num_parts, sliced=stacks)


def _place(plan: ParallelPlan, mesh: DeviceMesh) -> Place:
    pipelined = plan.pipeline_parallel.size > 1
    ranks = DataRanks(mesh, plan.context_parallel.size)
    return Place(
        num_parts_of_batch=1 if pipelined else ranks.num_parts,
        part_of_batch=0 if pipelined else ranks.part,
        tp_size=axis_size(mesh, "tp"),
        tp_rank=axis_rank(mesh, "tp"),
    )
