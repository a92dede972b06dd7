"""What a plan says of data parallelism, carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.mesh import axis_rank, data_size
from vescale_parallel._mesh.side_stream import SideStream, streams_of
from vescale_parallel._parameters.flat_shards import groups_of
from vescale_parallel._parameters.sent_shards import Offload
from vescale_parallel._parameters.shard_model import torch_dtype
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._plan.block_patterns import by_block
from vescale_parallel._plan.config import DataParallel
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._plan.recomputation import recomputes

from .gradient_rows import GradientBuffers
from .mix_up import Exchanges
from .param_group import ParamGroup
from .reductions import ReductionOrder, Reductions
from .zero_state import ZeroState


def resharding_by_block(data: DataParallel, blocks: Sequence[str]) -> dict[str, bool]:
    """Return of each block whether its parameters are freed between forward and backward.

    Raises:
        ValueError: If a pattern is of no block, or two of different values are of one.
    """
    said = data.reshard_after_forward
    if isinstance(said, bool):
        return dict.fromkeys(blocks, said)
    found = by_block("data_parallel.reshard_after_forward", said, blocks)
    return {block: found.get(block, True) for block in blocks}


def offload_of(data: DataParallel) -> Offload | None:
    """Return what is on the host, None for nothing."""
    if data.offload == "none":
        return None
    frees = data.zero_stage == 3
    return Offload(stays=frees and data.offload == "optimizer", is_gathered_often=frees)


def planned_zero_state(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    params: Sequence[ShardedParameter],
    blocks: Sequence[str],
) -> ZeroState:
    """Return the parameters of this rank, with hooks of theirs on the blocks."""
    rank, placement = axis_rank(mesh, "pp"), plan.pipeline_parallel.placement
    # Not with a tied weight of another stage: it is gathered and reduced where it is owned. Nor
    # with an expert of another rank.
    owned = [
        param
        for param in params
        if placement.rank_of(param.stages[0]) == rank and param.unsharded is not None
    ]
    root, param_groups = group_parameters(
        model,
        mesh,
        owned,
        blocks,
        param_dtype=torch_dtype(plan.precision.param),
        reduce_dtype=torch_dtype(plan.precision.reduce),
        order=plan.data_parallel.reduction,
        reshards=resharding_by_block(plan.data_parallel, blocks).__getitem__,
        offload=offload_of(plan.data_parallel),
        in_parts=plan.pipeline_parallel.size > 1 or plan.batch.gradient_accumulation > 1,
    )
    return ZeroState(
        mesh,
        params,
        root,
        param_groups,
        stage=1 if _has_nothing_to_free(plan, mesh, owned) else plan.data_parallel.zero_stage,
        sums_first=plan.pipeline_parallel.size > 1
        and plan.pipeline_parallel.reduce_every == "step",
        prefetch=plan.data_parallel.prefetch,
        runs_again=recomputes(plan.recompute),
    )


def _has_nothing_to_free(
    plan: ParallelPlan, mesh: DeviceMesh, owned: Sequence[ShardedParameter]
) -> bool:
    """Whether a rank alone computes with the very parameters it owns, whatever the stage."""
    is_alone = data_size(mesh) == 1 and plan.pipeline_parallel.size == 1
    return is_alone and all(param.shares_storage for param in owned)


def group_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    params: Sequence[ShardedParameter],
    blocks: Sequence[str],
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    order: ReductionOrder = "ordered",
    reshards: Callable[[str], bool] = lambda block: True,
    offload: Offload | None = None,
    in_parts: bool = False,
) -> tuple[ParamGroup, list[tuple[nn.Module, ParamGroup]]]:
    """Return the parameter group of what is outside of blocks, and the blocks with theirs.

    A block without parameters here has no group. ``reshards`` says of a block whether it is freed
    between its forward and its backward pass, ``in_parts`` whether gradients of micro-batches are
    added up first.
    """
    if in_parts and reduce_dtype is not None:
        for param in params:
            _add_up_in(reduce_dtype, param)
    group_of = groups_of(model, blocks)
    members: dict[int | None, list[ShardedParameter]] = {None: []}
    for param in params:
        members.setdefault(group_of(param.fqns), []).append(param)

    on_host = offload is not None
    buffers, exchanges = GradientBuffers(on_host, outlive_steps=not in_parts), Exchanges()
    stream = SideStream(streams_of(mesh.device_type), copies_host=on_host)
    reductions = Reductions(order, stream)

    def param_group(index: int | None) -> ParamGroup:
        number = 0 if index is None else index + 1
        of_group = members[index], mesh, param_dtype, reduce_dtype, number
        freed = index is None or reshards(blocks[index])
        return ParamGroup(*of_group, buffers, exchanges, reductions, freed, offload)

    owned = [index for index in range(len(blocks)) if index in members]
    return param_group(None), [
        (model.get_submodule(blocks[index]), param_group(index)) for index in owned
    ]


def _add_up_in(dtype: torch.dtype, param: ShardedParameter) -> None:
    """Have autograd add gradients of micro-batches in the dtype of reductions, if it is wider."""
    plain = param.unsharded
    if plain is not None and plain.is_floating_point():
        plain.grad_dtype = torch.promote_types(plain.dtype, dtype)
