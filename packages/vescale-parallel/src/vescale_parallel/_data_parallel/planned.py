"""What a plan says of data parallelism, carried out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.mesh import axis_rank
from vescale_parallel._parameters.shard_model import torch_dtype
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._plan.plan import ParallelPlan

from .param_group import group_parameters
from .zero_state import ZeroState


def planned_zero_state(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    params: Sequence[ShardedParameter],
    blocks: Sequence[str],
) -> ZeroState:
    """Return the parameters of this rank, with hooks of theirs on the blocks."""
    rank, placement = axis_rank(mesh, "pp"), plan.pipeline_parallel.placement
    # Not with a tied weight of another stage: it is gathered and reduced where it is owned.
    owned = [param for param in params if placement.rank_of(param.stages[0]) == rank]
    root, param_groups = group_parameters(
        model,
        mesh,
        owned,
        blocks,
        param_dtype=torch_dtype(plan.precision.param),
        reduce_dtype=torch_dtype(plan.precision.reduce),
        order=plan.data_parallel.reduction,
    )
    return ZeroState(
        mesh,
        params,
        root,
        param_groups,
        stage=plan.data_parallel.zero_stage,
        pipelined=plan.pipeline_parallel.size > 1,
        prefetch=plan.data_parallel.prefetch,
        runs_again=plan.recompute == "full",
    )
