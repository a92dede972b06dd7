"""The entry point: from a plan, a model and an ordinary loop to an nD-parallel one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Box, DTensor, announced_failures, local_boxes, local_shape

from ._certify import contradicted_module
from ._engine import Engine, ParallelModule
from ._loader import ParallelLoader
from ._mesh import (
    axis_group,
    axis_rank,
    axis_size,
    build_mesh,
    check_agreement,
    start_process_group,
    this_device,
)
from ._optimizer import parallelize_optimizer
from ._pipeline import Pipeline
from ._plan import ParallelPlan
from ._policies import tensor_parallel_plan
from ._sharding_plan import Resolved, resolve
from ._slots import Slot, placements_of, shard_dim_of
from ._stage_map import StageMap, stage_map
from ._stages import Staging, stage_module
from ._stand_ins import stand_in
from ._structure import block_stacks, check_signature, described_values, model_signature
from ._tensor_parallel import complete_placements, install
from ._units import Unit

Read = Callable[[Tensor, Box], Tensor]


def read_real(tensor: Tensor, box: Box) -> Tensor:
    """Return a box of a tensor that exists."""
    return tensor.detach()[box.slices]


def parallelize(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
    dataset: Any | None = None,
    *,
    read: Read = read_real,
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
        _check_arguments(plan, model, optimizer_fn, lr_scheduler_fn)
        check_agreement(
            plan=plan.to_json(),
            model=repr(model_signature(model)),
            arguments=repr([x is None for x in (optimizer_fn, lr_scheduler_fn, dataset)]),
            **described_values(model),
        )
        plan.check_world_size(dist.get_world_size())
        check_signature(plan, model)
        _check_supported(plan, model)
        return _carry_out(plan, model, optimizer_fn, lr_scheduler_fn, dataset, read)


def _carry_out(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None,
    dataset: Any | None,
    read: Read,
) -> Any:
    resolved = _resolve_sharding(plan, model)
    tp = complete_placements(resolved, model, plan.tensor_parallel.size)
    stages = stage_map(plan, model)
    mesh = build_mesh(plan)
    loader = None if dataset is None else ParallelLoader(plan, dataset, mesh)
    staging = Staging()
    if stages is not None:
        _stage_modules(plan, model, stages, staging)
    group = axis_group(mesh, "tp")
    slots = _make_slots(plan, model, mesh, tp, resolved, stages, read)
    _move_buffers(model, read)
    if group is not None:
        install(model, resolved, tp, group)
    engine = _make_engine(plan, model, mesh, slots, stages, staging)
    cls = type(model)
    model.__class__ = type(cls.__name__, (ParallelModule, cls), {"__module__": cls.__module__})
    object.__setattr__(model, "_vescale_engine", engine)
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


def _check_arguments(
    plan: object, model: object, optimizer_fn: object, lr_scheduler_fn: object
) -> None:
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"expected plan to be a ParallelPlan, got {type(plan).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, got {type(model).__name__}")
    hooked = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"{hooked[0]!r} has a post-accumulate-grad hook; register it after parallelize"
        )
    if isinstance(model, ParallelModule):
        raise ValueError(f"{type(model).__name__} is parallelized already")
    for name, value in (("optimizer_fn", optimizer_fn), ("lr_scheduler_fn", lr_scheduler_fn)):
        if value is not None and (isinstance(value, Optimizer) or not callable(value)):
            raise TypeError(f"expected {name} to be a function, got {type(value).__name__}")
    if lr_scheduler_fn is not None and optimizer_fn is None:
        raise ValueError("lr_scheduler_fn needs optimizer_fn, whose optimizer it schedules")


def _check_supported(plan: ParallelPlan, model: nn.Module) -> None:
    """Refuse what this version has no code for."""
    asked = {
        "context_parallel.size > 1": plan.context_parallel.size > 1,
        "expert_parallel.size > 1": plan.expert_parallel.size > 1,
        "tensor_parallel.sequence": plan.tensor_parallel.sequence,
        "compile": plan.compile,
    }
    for name, wanted in asked.items():
        if wanted:
            raise ValueError(f"{name} is not available in this version; leave it out of the plan")
    parts = plan.data_parallel.size * plan.pipeline_parallel.microbatches
    batch_norms = [
        fqn
        for fqn, module in model.named_modules()
        if any(base.__name__ == "_BatchNorm" for base in type(module).__mro__)
    ]
    if parts > 1 and batch_norms:
        raise ValueError(
            f"{batch_norms[0]!r} normalizes over the batch, of which a rank sees only one of "
            f"{parts} parts; use data_parallel.size 1 and one micro-batch, or another norm"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy parameters; run it once before parallelizing it")


def _resolve_sharding(plan: ParallelPlan, model: nn.Module) -> Resolved:
    section = plan.tensor_parallel
    sharding = dict(section.sharding_plan)
    if not sharding and section.sharding_policy != "manual":
        sharding = tensor_parallel_plan(model, section.sharding_policy, section.size)
    resolved = resolve(sharding if section.size > 1 else {}, model)
    if section.sharding_policy == "manual" and section.size > 1:
        wrong = contradicted_module(model, resolved, section.size)
        if wrong is not None:
            raise ValueError(
                f"tensor_parallel.sharding_plan changes what {wrong!r} computes: run whole and "
                "rank by rank on random weights, its output or gradients differ"
            )
    return resolved


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


def _make_slots(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    tp: dict[str, Placement],
    resolved: Resolved,
    stages: StageMap | None,
    read: Read,
) -> list[Slot]:
    """Replace every parameter by its face, holding this rank's part only."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
        tensors[id(parameter)] = parameter
    slots: list[Slot] = []
    for key, fqns in names.items():
        placed = {fqn: tp[fqn] for fqn in fqns if fqn in tp}
        if placed and (len(placed) < len(fqns) or len(set(placed.values())) > 1):
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqns} are one tied parameter and need one "
                f"placement each, all equal, got {placed}"
            )
        partial = [fqn for fqn in fqns if fqn in resolved.grads]
        slot = _make_slot(
            plan,
            mesh,
            tensors[key],
            fqns=tuple(fqns),
            sites=tuple(_site(model, fqn) for fqn in fqns),
            tp=next(iter(placed.values()), Replicate()),
            partial_over_tp=bool(partial),
            stages=stages.stages_of(fqns) if stages is not None else (0,),
            read=read,
        )
        if slot.compute is None:
            slot.stand_in = stand_in(slot.face.shape, slot.face.dtype, slot.face.device)
        slot.show_face()
        slots.append(slot)
    return slots


def _make_slot(
    plan: ParallelPlan,
    mesh: DeviceMesh,
    parameter: nn.Parameter,
    *,
    fqns: tuple[str, ...],
    sites: tuple[tuple[nn.Module, str], ...],
    tp: Placement,
    partial_over_tp: bool,
    stages: tuple[int, ...],
    read: Read,
) -> Slot:
    shape = parameter.shape
    shard_dim = shard_dim_of(shape, tp) if axis_size(mesh, "dp_shard") > 1 else None
    pp_size = plan.pipeline_parallel.size
    placements = placements_of(mesh, shape, tp=tp, shard_dim=shard_dim, owner=stages[0] % pp_size)
    local = _read_local(parameter, mesh, placements, read)
    face = nn.Parameter(
        DTensor.from_local(local, mesh, placements, shape=shape), parameter.requires_grad
    )
    # What people hang on a parameter, decay flags and gradient hooks for example, stays on it.
    for name, value in vars(parameter).items():
        setattr(face, name, value)
    for hook in (parameter._backward_hooks or {}).values():
        face.register_hook(hook)
    compute = None
    if any(stage % pp_size == axis_rank(mesh, "pp") for stage in stages):
        dtype = torch_dtype(plan.precision.param) if local.is_floating_point() else None
        compute = _make_compute(parameter, local, mesh, tp, dtype or local.dtype)
    return Slot(fqns, sites, face, compute, shard_dim, partial_over_tp, stages)


def _make_compute(
    parameter: nn.Parameter, local: Tensor, mesh: DeviceMesh, tp: Placement, dtype: torch.dtype
) -> nn.Parameter:
    """Return the plain parameter of a stage: the face's storage if nothing else is needed."""
    shape = local_shape(parameter.shape, (axis_size(mesh, "tp"),), (axis_rank(mesh, "tp"),), (tp,))
    if tuple(local.shape) == shape and local.dtype == dtype:
        data = local
    else:
        data = torch.empty(shape, dtype=dtype, device=local.device)
    return nn.Parameter(data, parameter.requires_grad)


def _read_local(
    parameter: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], read: Read
) -> Tensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shape = parameter.shape
    local = torch.empty(
        local_shape(shape, mesh.shape, coordinate, placements),
        dtype=parameter.dtype,
        device=this_device(),
    )
    for held in local_boxes(shape, mesh.shape, coordinate, placements):
        local[held.local_slices] = read(parameter, held.box).to(local.device)
    return local


def _site(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, name = fqn.rpartition(".")
    return model.get_submodule(owner), name


def _move_buffers(model: nn.Module, read: Read) -> None:
    """Give every rank every buffer, on its device; shared ones stay shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                whole = read(buffer, Box.whole(buffer.shape))
                moved[id(buffer)] = whole.to(this_device())
            module._buffers[name] = moved[id(buffer)]


def _make_engine(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    slots: Sequence[Slot],
    stages: StageMap | None,
    staging: Staging,
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
        for index in range(len(blocks)):
            _recompute(model.get_submodule(blocks[index]))
    engine = Engine(plan, mesh, slots, unit(None), block_units, pipelined=stages is not None)
    if stages is not None:
        engine.pipeline = Pipeline(
            plan, mesh, staging, stages.starts, len(stages.blocks), engine.total_over_data_ranks
        )
    return engine


def _blocks(model: nn.Module) -> tuple[str, ...]:
    return tuple(fqn for stack in block_stacks(model) for fqn in stack)


def _names_below(model: nn.Module, fqn: str) -> list[str]:
    module = model.get_submodule(fqn)
    return [f"{fqn}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]


def _recompute(block: nn.Module) -> None:
    """Run a block's forward again in backward instead of keeping its activations."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a plan's precision name."""
    return None if name is None else getattr(torch, name)
