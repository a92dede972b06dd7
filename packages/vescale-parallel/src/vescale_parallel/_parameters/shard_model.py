"""Put every parameter and buffer where the plan says: only what this rank owns exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import Box, DTensor, RaggedShard, local_boxes, local_shape
from vescale_parallel._mesh.mesh import axis_rank, axis_size
from vescale_parallel._mesh.process_group import this_device
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding

from .compute_dtypes import compute_dtypes
from .flat_shards import Cut, FlatPlace, Placed, groups_of, place_in_buffers
from .host_memory import empty_on_host
from .memory_layout import Stride, dense_stride, stride_of_part
from .replaced import mark_replaced
from .sharded_parameter import ShardedParameter, all_on, placements_of

Read = Callable[[Tensor, Box], Tensor]
# The pipeline stages that use a parameter, given all its names; the owner first.
StagesOf = Callable[[Sequence[str]], tuple[int, ...]]
Placeholder = Callable[[torch.Size, torch.dtype, torch.device], Tensor]


def read_real(tensor: Tensor, box: Box) -> Tensor:
    """Return a box of a tensor that exists."""
    return tensor.detach()[box.slices]


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a plan's precision name."""
    return None if name is None else getattr(torch, name)


def shard_parameters(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: TensorSharding,
    blocks: Sequence[str],
    stages_of: StagesOf,
    placeholder: Placeholder,
    read: Read,
    experts: Mapping[str, int | None] = MappingProxyType({}),
    *,
    block: int = 1,
) -> list[ShardedParameter]:
    """Replace every parameter by a DTensor that holds this rank's shard only.

    Those of one of ``blocks`` travel together. ``stages_of`` returns the pipeline stages that use
    a parameter, ``placeholder`` what takes the place of one that no stage of this rank uses,
    ``read`` the values of a box of a tensor. ``experts`` are the parameters of experts: of
    those that stack some each rank of the ``ep`` axis has its own, and one rank, which is their
    value, has all of the others. ``mesh`` is that of :func:`.state_mesh`.
    Shards begin at multiples of ``block`` elements of a parameter.
    """
    names, tensors = dict[int, list[str]](), {id(p): p for p in model.parameters()}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    tp = {key: _tp_placement(fqns, sharding) for key, fqns in names.items()}
    stages = {key: stages_of(fqns) for key, fqns in names.items()}
    num_ranks = axis_size(mesh, "ep")
    held = {
        key: _ep_placement(tensors[key].shape, num_ranks, experts, fqns)
        for key, fqns in names.items()
    }
    dtypes = compute_dtypes(model, torch_dtype(plan.precision.param))
    group_of = groups_of(model, blocks)
    placed = {
        key: (
            (group_of(fqns), _owner(plan, stages[key]), _holder(experts, fqns)),
            tensors[key],
            _cuts(mesh, tp[key], held[key]),
        )
        for key, fqns in names.items()
        # Of a scalar every rank has a copy: an optimizer's state of it is one, too.
        if tensors[key].ndim
    }
    places = _places(plan, mesh, placed, dtypes, block)
    params: list[ShardedParameter] = []
    for key, fqns in names.items():
        param = _shard_parameter(
            plan,
            mesh,
            tensors[key],
            fqns=tuple(fqns),
            sites=tuple(_site(model, fqn) for fqn in fqns),
            tp=tp[key],
            partial_over_tp=any(fqn in sharding.spec.grads for fqn in fqns),
            stages=stages[key],
            place=places.get(key),
            read=read,
            ep=held[key],
            compute_dtype=dtypes[key],
        )
        if param.unsharded is None:
            like = param.sharded
            param.placeholder = placeholder(like.shape, like.dtype, this_device())
        param.hang()
        params.append(param)
    mark_replaced({fqns[0]: tensors[key] for key, fqns in names.items()})
    return params


def _places(
    plan: ParallelPlan,
    mesh: DeviceMesh,
    placed: Mapping[int, Placed],
    dtypes: Mapping[int, torch.dtype],
    block: int,
) -> dict[int, FlatPlace]:
    """Return where parameters are in flat buffers, nothing where ranks have copies of all."""
    if axis_size(mesh, "dp_shard") == 1 and not _is_on_host(plan):
        return {}
    return place_in_buffers(
        placed,
        ranks=axis_size(mesh, "dp_shard"),
        rank=axis_rank(mesh, "dp_shard"),
        copies=axis_size(mesh, "dp_replicate") * axis_size(mesh, "ep"),
        replicas=plan.data_parallel.state_replicas,
        compute_dtype=lambda parameter: dtypes[id(parameter)],
        device=this_device(),
        on_host=_is_on_host(plan),
        is_kept=plan.data_parallel.zero_stage < 3,
        block=block,
    )


def _tp_placement(fqns: Sequence[str], sharding: TensorSharding) -> Placement:
    """Return how tensor parallelism cuts a parameter, given all its names."""
    tp = sharding.placements
    placed = {fqn: tp[fqn] for fqn in fqns if fqn in tp}
    if placed and (len(placed) < len(fqns) or len(set(placed.values())) > 1):
        raise ValueError(
            f"tensor_parallel.sharding_plan: {list(fqns)} are one tied parameter and need one "
            f"placement each, all equal, got {placed}"
        )
    return next(iter(placed.values()), Replicate())


def _holder(experts: Mapping[str, int | None], fqns: Sequence[str]) -> tuple[bool, int | None]:
    """Return whether a parameter is of experts, and the one rank that has it, None for all."""
    return fqns[0] in experts, experts.get(fqns[0])


def _ep_placement(
    shape: torch.Size, size: int, experts: Mapping[str, int | None], fqns: Sequence[str]
) -> Placement | None:
    """Return how ranks that share experts hold a parameter, None if it is of none."""
    is_expert, holder = _holder(experts, fqns)
    if not is_expert:
        return None
    return Shard(0) if holder is None else all_on(holder, size, shape)


def _cuts(mesh: DeviceMesh, tp: Placement, ep: Placement | None) -> list[Cut]:
    """Return the axes that cut what a rank computes with: their size, its rank, and how."""
    axes: list[tuple[str, Placement]] = [("ep", ep)] if isinstance(ep, Shard) else []
    return [
        (axis_size(mesh, axis), axis_rank(mesh, axis), how) for axis, how in [*axes, ("tp", tp)]
    ]


def _owner(plan: ParallelPlan, stages: Sequence[int]) -> int:
    """Return the pipeline rank that owns what these stages use."""
    return plan.pipeline_parallel.placement.rank_of(stages[0])


def _is_on_host(plan: ParallelPlan) -> bool:
    return plan.data_parallel.offload != "none"


def _shard_parameter(
    plan: ParallelPlan,
    mesh: DeviceMesh,
    parameter: nn.Parameter,
    *,
    fqns: tuple[str, ...],
    sites: tuple[tuple[nn.Module, str], ...],
    tp: Placement,
    partial_over_tp: bool,
    stages: tuple[int, ...],
    place: FlatPlace | None,
    read: Read,
    ep: Placement | None,
    compute_dtype: torch.dtype,
) -> ShardedParameter:
    shape, owner = parameter.shape, _owner(plan, stages)
    placements = placements_of(mesh, shape, tp=tp, place=place, owner=owner, ep=ep)
    sizes, ranks, cuts = zip(*_cuts(mesh, tp, ep), strict=True)
    part = torch.Size(local_shape(shape, sizes, ranks, cuts))
    # Another rank has this expert.
    is_elsewhere = isinstance(ep, RaggedShard) and not ep.local_units[axis_rank(mesh, "ep")]
    is_owner = owner == axis_rank(mesh, "pp") and not is_elsewhere
    own_place, on_host = place if is_owner else None, _is_on_host(plan)
    stride = dense_stride(parameter)
    part_stride = stride_of_part(part, shape, stride)
    local = _read_local(
        parameter, mesh, placements, read, own_place, part, stride, on_host=on_host
    )
    sharded = nn.Parameter(
        DTensor.from_local(local, mesh, placements, shape=shape), parameter.requires_grad
    )
    # A part in another memory order than the whole may have been copied.
    local = cast("DTensor", sharded)._local_tensor.detach()
    # What people hang on a parameter, decay flags and gradient hooks for example, stays on it.
    for name, value in vars(parameter).items():
        setattr(sharded, name, value)
    for hook in (parameter._backward_hooks or {}).values():
        sharded.register_hook(hook)
    unsharded, shares = None, False
    users = [plan.pipeline_parallel.placement.rank_of(stage) for stage in stages]
    if axis_rank(mesh, "pp") in users and not is_elsewhere:
        # Not told by shapes: one rank may have all of a short dim, and others nothing.
        is_its_own = compute_dtype == local.dtype and local.stride() == part_stride
        shares = is_owner and place is None and is_its_own and not on_host
        data = local
        if is_owner and place is not None:
            data = place.shards.whole_of(place.index, part, part_stride)
        elif not shares:
            data = _empty(part, part_stride, compute_dtype)
        unsharded = nn.Parameter(data, parameter.requires_grad)
        if is_owner and not shares and place is None:
            # Filled before every use. What is tied to another stage's is received instead.
            unsharded.untyped_storage().resize_(0)
    return ShardedParameter(
        *(fqns, sites, sharded, unsharded, shares, place, partial_over_tp, stages),
        is_expert=ep is not None,
        stride=stride,
    )


def _read_local(
    parameter: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    read: Read,
    place: FlatPlace | None,
    part: torch.Size,
    stride: Stride,
    *,
    on_host: bool,
) -> Tensor:
    """Return this rank's shard, in its place if it has one; ``part`` is what it computes with."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shape = parameter.shape
    sizes = torch.Size(local_shape(shape, mesh.shape, coordinate, placements))
    # The owner among stages has all of it, too.
    is_whole = all(placement == Replicate() for placement in placements) or sizes == shape
    # What a deferred model, or a class of tensors of its own, has is read; others are there.
    is_there = type(parameter) is nn.Parameter and not parameter.is_meta
    if is_there and is_whole and place is None and not on_host:
        own = parameter.detach()
        if own.device == this_device() and own.stride() == stride and _has_own_memory(own):
            return own  # not held twice, and in its place
    if place is not None:
        local = place.shards.shard_of(place.index, part.numel(), sizes)
    else:
        local = (
            empty_on_host(sizes, dtype=parameter.dtype, device=this_device())
            if on_host
            else _empty(sizes, stride_of_part(sizes, shape, stride), parameter.dtype)
        )
    values = read_real if is_there else read
    for held in local_boxes(shape, mesh.shape, coordinate, placements):
        held.of(local).copy_(values(parameter, held.box))
    return local


def _empty(shape: torch.Size, stride: Stride, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=this_device())


def _has_own_memory(tensor: Tensor) -> bool:
    # A model that torch.multiprocessing.spawn hands to its processes is in memory of all of them.
    if tensor.device.type == "cpu" and tensor.is_shared():
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _site(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, name = fqn.rpartition(".")
    return model.get_submodule(owner), name


def move_buffers(model: nn.Module, read: Read) -> None:
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
