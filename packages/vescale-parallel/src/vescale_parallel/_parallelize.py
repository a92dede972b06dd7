"""The entry point: from a plan, a model and an ordinary loop to an nD-parallel one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from vescale_dtensor import announced_failures

from ._auto_sharding.policies import propose_sharding
from ._cross_replica.batch import BatchRows, exchange_over
from ._cross_replica.call_guard import RowGuard
from ._cross_replica.regions import RowRegions
from ._data_parallel.loader import ParallelLoader
from ._data_parallel.param_group import Unit
from ._mesh.agreement import check_agreement, meet
from ._mesh.mesh import axis_group, axis_rank, axis_size, build_mesh, data_groups, second_group
from ._mesh.process_group import start_process_group
from ._model.blocks import block_stacks
from ._model.inputs import example_from, example_of
from ._model.signature import check_signature, described_values, model_signature
from ._parameters.shard_model import Read, make_slots, move_buffers, read_real, torch_dtype
from ._parameters.sharded_parameter import Slot
from ._pipeline.placeholders import stand_in
from ._pipeline.runner import Pipeline
from ._pipeline.stage_assignment import StageMap, stage_map
from ._pipeline.stage_buffers import StageBuffers
from ._pipeline.stage_module import Staging, stage_module
from ._plan.plan import ParallelPlan
from ._plan.supported import check_supported
from ._rng.call_forms import DrawForms
from ._rng.sharded_rng import Draws, Place
from ._runtime.checks import check_arguments
from ._runtime.engine import Engine, ParallelModule, namespace_of
from ._runtime.optimizer import parallelize_optimizer
from ._runtime.outside import KnownModules, refuse_parts
from ._runtime.recompute import keep_no_caches, recompute
from ._runtime.same_inputs import SameInputs
from ._tensor_parallel.apply import install, sequence_ends
from ._tensor_parallel.async_reduce import make_beside
from ._tensor_parallel.communicators import ProcessRanks
from ._tensor_parallel.conversions import Boundary
from ._tensor_parallel.explain import Applied, said_whole
from ._tensor_parallel.tensor_sharding import TensorSharding, shard
from ._tensor_parallel.vocab_parallel import LiftPlain, keep_sharded
from ._trace.fake_tensors import bind
from ._verify.call_guard import CallGuard
from ._verify.call_signature import CallForms, proven_forms
from ._verify.manual_plan import checked_plan


def parallelize(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
    dataset: Any | None = None,
    *,
    read: Read = read_real,
    construction: str = "",
) -> Any:
    """Make a model, and what trains it, run as a plan says. Every rank must call this.

    The model is changed in place: it keeps its class, names and forward, its parameters
    become DTensors of global shape, and calls of it take this rank's part of a batch. Starts
    the process group from torchrun's environment if nobody did.

    Args:
        plan: What to do.
        model: Any module; on one device or deferred. Under pipeline parallelism its forward
            returns its loss.
        optimizer_fn: Called on the parallelized model; returns a torch optimizer.
        lr_scheduler_fn: Called on the optimizer.
        dataset: A map-style data set; becomes a :class:`ParallelLoader`.
        read: Returns the values of a box of one of the model's tensors.
        construction: What tells how those values came about, equal on all ranks.

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
        check_agreement(
            plan=plan.to_json(),
            model=repr(model_signature(model)),
            arguments=f"optimizer_fn {optimizer_fn is not None}, lr_scheduler_fn "
            f"{lr_scheduler_fn is not None}, dataset {dataset is not None}",
            construction=construction,
            **described_values(model),
        )
        plan.check_world_size(dist.get_world_size())
        check_signature(plan, model)
        check_supported(plan, model)
        return _carry_out(plan, model, optimizer_fn, lr_scheduler_fn, dataset, read)


def _carry_out(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None,
    dataset: Any | None,
    read: Read,
) -> Any:
    batch = example_of(model) if dataset is None else example_from(dataset)
    meet()  # a data set that failed on one rank; what comes next may take long
    sharding, guard, left_whole = _shard(plan, model, batch)
    stages = stage_map(plan, model)
    num_parts = plan.data_parallel.size * plan.pipeline_parallel.microbatches
    mesh = build_mesh(plan)
    exchange = exchange_over(data_groups(mesh))
    row_guard = None
    if num_parts > 1:
        # What a pipeline returns besides its loss is nothing.
        row_guard = RowGuard(model, exchange, losses_only=stages is not None)
    forms = None
    if mesh.size() > 1 and stages is None:
        looks = row_guard or RowGuard(model, exchange)
        has_parts = plan.data_parallel.size > 1
        forms = DrawForms(model, looks, batch, sharding, exchange, has_parts=has_parts)
    loader = None if dataset is None else ParallelLoader(plan, dataset, mesh)
    if row_guard is not None and loader is not None:
        row_guard.is_rows_first = loader.gave
    staging = Staging()
    if stages is not None:
        _stage_modules(plan, model, stages, staging)
    group = axis_group(mesh, "tp")
    stages_of = _only_stage if stages is None else stages.stages_of
    slots = make_slots(plan, model, mesh, sharding, stages_of, stand_in, read)
    move_buffers(model, read)
    lift: LiftPlain | None = None
    boundary: Boundary | None = None
    if group is not None:
        lift = LiftPlain(mesh["tp"])
        keep_cut = functools.partial(keep_sharded, mesh=mesh["tp"], lift=lift)
        parts = plan.tensor_parallel.overlap
        beside = make_beside(ProcessRanks(second_group(mesh, "tp"))) if parts > 1 else None
        boundary = Boundary(
            ProcessRanks(group), even=stages is not None, beside=beside, num_parts=parts
        )
        install(model, sharding, boundary, keep_cut=keep_cut)
        if stages is None:
            boundary.watch(model, sequence_ends(sharding.spec))
    lengths: dict[str, int] = {} if boundary is None else boundary.lengths
    draws = Draws(_place(mesh), lengths, None if forms is None else forms.known)
    if forms is not None:
        draws.install(model)
    for slot in slots:
        slot.refuse_calls_outside()
    rows = _batch_rows(mesh, row_guard, lift, num_parts, pipelined=stages is not None)
    engine = _make_engine(plan, model, mesh, slots, stages, staging, draws, rows, lift)
    engine.guard = guard
    engine.inputs = SameInputs(model, mesh, is_delayed=mesh.device_type == "cuda")
    engine.known = KnownModules(model, slots)
    if plan.data_parallel.size > 1 or stages is not None:
        refuse_parts(model, _blocks(model), lambda: engine.is_running)
    if lift is not None:
        model.register_forward_hook(engine.plain_results, prepend=True)
    cls = type(model)
    model.__class__ = type(cls.__name__, (ParallelModule, cls), namespace_of(cls))
    object.__setattr__(model, "_vescale_engine", engine)
    object.__setattr__(model, "_vescale_sharding", Applied(sharding, boundary, left_whole))
    return _train_parts(model, optimizer_fn, lr_scheduler_fn, loader)


def _train_parts(
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None,
    loader: ParallelLoader | None,
) -> Any:
    parts: list[Any] = [model]
    if optimizer_fn is not None:
        optimizer = parallelize_optimizer(optimizer_fn(model), model)
        parts.append(optimizer)
        if lr_scheduler_fn is not None:
            parts.append(lr_scheduler_fn(optimizer))
    if loader is not None:
        parts.append(loader)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _batch_rows(
    mesh: DeviceMesh,
    guard: RowGuard | None,
    lift: LiftPlain | None,
    num_parts: int,
    *,
    pipelined: bool,
) -> BatchRows:
    names = mesh.mesh_dim_names or ()
    axes = tuple(name for name in names if name in ("dp_replicate", "dp_shard"))
    regions = None
    if guard is not None and not pipelined:
        tp = ("tp",) if "tp" in names else ()
        over_all = mesh[(*axes, *tp)] if tp else None
        regions = RowRegions(mesh[axes], mesh["tp"] if tp else None, over_all, lift)
    return BatchRows(guard, regions, data_groups(mesh), num_parts)


def _only_stage(fqns: Sequence[str]) -> tuple[int, ...]:
    return (0,)


def _place(mesh: DeviceMesh) -> Place:
    copies, shards = axis_size(mesh, "dp_replicate"), axis_size(mesh, "dp_shard")
    return Place(
        num_parts_of_batch=copies * shards,
        part_of_batch=axis_rank(mesh, "dp_replicate") * shards + axis_rank(mesh, "dp_shard"),
        tp_size=axis_size(mesh, "tp"),
        tp_rank=axis_rank(mesh, "tp"),
    )


def _shard(
    plan: ParallelPlan, model: nn.Module, batch: Any
) -> tuple[TensorSharding, CallGuard | None, dict[str, str]]:
    section = plan.tensor_parallel
    if section.size == 1:
        return shard({}, model, 1), None, {}
    left_whole = said_whole(plan.reasons)
    said, proven = dict(section.sharding_plan), proven_forms(section)
    if not said and section.sharding_policy != "manual":
        proposal = propose_sharding(
            model,
            section.sharding_policy,
            section.size,
            sequence=section.sequence,
            example_batch=batch,
        )
        form = proposal.proven_call
        said, proven = proposal.plan, [] if form is None else [form]
        left_whole = proposal.left_whole
    sharding = shard(said, model, section.size)
    if section.sharding_policy == "manual":
        sharding, is_proven = checked_plan(
            model, sharding, batch, declared=section.communication == "declared"
        )
        proven = [CallForms(model).form(*bind(model, batch))] if is_proven else []
    guard = CallGuard(model, said, sharding, proven)
    return sharding, guard, left_whole


def _stage_modules(
    plan: ParallelPlan, model: nn.Module, stages: StageMap, staging: Staging
) -> None:
    dtype = torch_dtype(plan.precision.param)
    # Skeletons are copied from whole modules, so before any is changed.
    roles = [
        (fqn, index, (stages.stage_of_block(index),)) for index, fqn in enumerate(stages.blocks)
    ]
    roles += [(fqn, None, (stage,)) for fqn, stage in stages.outside.items()]
    for fqn, index, owners in roles:
        stage_module(
            model.get_submodule(fqn),
            staging,
            fqn=fqn,
            index=index,
            stages=owners,
            param_dtype=dtype,
        )


def _make_engine(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    slots: Sequence[Slot],
    stages: StageMap | None,
    staging: Staging,
    draws: Draws,
    rows: BatchRows,
    lift: LiftPlain | None,
) -> Engine:
    param_dtype, reduce_dtype = (
        torch_dtype(plan.precision.param),
        torch_dtype(plan.precision.reduce),
    )
    rank, size = axis_rank(mesh, "pp"), plan.pipeline_parallel.size
    blocks = stages.blocks if stages is not None else _blocks(model)
    block_of = {name: i for i, fqn in enumerate(blocks) for name in _names_below(model, fqn)}
    members: dict[int | None, list[Slot]] = {None: []}
    for slot in slots:
        # A borrowed weight is no member here: it is gathered and reduced where it is owned.
        if slot.stages[0] % size != rank:
            continue
        where = {block_of.get(fqn) for fqn in slot.fqns}
        members.setdefault(where.pop() if len(where) == 1 else None, []).append(slot)

    def unit(index: int | None) -> Unit:
        number = 0 if index is None else index + 1
        return Unit(members[index], mesh, param_dtype, reduce_dtype, number)

    owned = [index for index in range(len(blocks)) if index in members]
    block_units = [(model.get_submodule(blocks[index]), unit(index)) for index in owned]
    if plan.recompute == "full":
        keep_no_caches(model)
        rows.prepare(model, blocks)
        for fqn in blocks:
            recompute(model.get_submodule(fqn), draws.as_now, fqn)
    pipelined = stages is not None
    engine = Engine(
        plan,
        mesh,
        slots,
        unit(None),
        block_units,
        pipelined=pipelined,
        draws=draws,
        rows=rows,
        lift=lift,
    )
    if stages is not None:
        engine.pipeline = Pipeline(
            plan, mesh, staging, stages.starts, len(stages.blocks), engine.total_over_data_ranks
        )
        if any(True for _ in model.buffers()):
            engine.buffers = StageBuffers(model, engine.pipeline.group_of("F"))
    return engine


def _blocks(model: nn.Module) -> tuple[str, ...]:
    return tuple(fqn for stack in block_stacks(model) for fqn in stack)


def _names_below(model: nn.Module, fqn: str) -> list[str]:
    module = model.get_submodule(fqn)
    return [f"{fqn}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
