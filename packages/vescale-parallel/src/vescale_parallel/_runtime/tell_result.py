"""What became of a plan on this rank, as the log says it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import package_logger
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._pipeline.stage_assignment import StageMap
from vescale_parallel._plan.plan import ParallelPlan

_log = package_logger("vescale.parallel")


def tell_result(
    plan: ParallelPlan,
    mesh: DeviceMesh,
    params: Sequence[ShardedParameter],
    stages: StageMap | None,
) -> None:
    """Log where stages begin, the mesh, and what this rank owns."""
    if not _log.isEnabledFor(logging.INFO):
        return
    if stages is not None:
        firsts = ", ".join(stages.blocks[start] for start in stages.starts)
        _log.info("pipeline stages begin at %s", firsts)
    local = [param.local for param in params]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in local)
    own, total = sum(t.numel() for t in local), sum(p.sharded.numel() for p in params)
    _log.info("mesh %s of %s: %s", mesh.mesh_dim_names, mesh.device_type, plan.axes)
    _log.debug("this rank owns %d of %d parameter elements, %d bytes", own, total, nbytes)
