"""What a plan may ask for and this version has no code for."""

from __future__ import annotations

from torch import nn
from torch.compiler import list_backends

from .operators import checked_overloads
from .plan import ParallelPlan


def check_supported(plan: ParallelPlan, model: nn.Module) -> None:
    """Refuse what this version has no code for."""
    _check_compile(plan)
    for name in plan.recompute_keep:
        checked_overloads(name)
    parts = plan.data_parallel.size * plan.num_microbatches
    names = {fqn: {base.__name__ for base in type(m).__mro__} for fqn, m in model.named_modules()}
    batch_norms = [fqn for fqn, bases in names.items() if "_BatchNorm" in bases]
    if plan.pipeline_parallel.size > 1 and parts > 1 and batch_norms:
        raise ValueError(
            f"{batch_norms[0]!r} normalizes over the batch, which a pipeline runs in {parts} "
            "parts one after the other; use pipeline_parallel.size 1, or another norm"
        )
    accumulated = plan.batch.gradient_accumulation
    if accumulated > 1 and batch_norms:
        raise ValueError(
            f"{batch_norms[0]!r} normalizes over the batch, of which batch.gradient_accumulation "
            f"runs {accumulated} parts one after the other; use another norm, or leave it out and "
            "accumulate in the loop, where every batch is normalized by itself"
        )
    synced = [fqn for fqn, bases in names.items() if "SyncBatchNorm" in bases]
    if plan.world_size > 1 and synced:
        raise ValueError(
            f"{synced[0]!r} is a SyncBatchNorm, which exchanges statistics with all ranks itself; "
            "use nn.BatchNorm1d, 2d or 3d: they normalize over the global batch under every plan"
        )


def _check_compile(plan: ParallelPlan) -> None:
    """Refuse to compile blocks whose forward does what a compiler does not see."""
    if plan.compile == "none":
        return
    overlap = plan.tensor_parallel.overlap
    if overlap > 1:
        raise ValueError(
            f"compile {plan.compile!r} is not available with tensor_parallel.overlap {overlap}, "
            "which has a thread sum a part of a layer's output while the next is computed: a "
            "compiled block has no threads; expected overlap 1, or compile 'none'"
        )
    if plan.pipeline_parallel.offload_activations:
        raise ValueError(
            "compile 'blocks' is not available with pipeline_parallel.offload_activations in this "
            "version: what compiled code keeps for backward is not seen; leave one of them out"
        )
    backends = list_backends(exclude_tags=None)
    if plan.compile_backend not in backends:
        raise ValueError(
            f"expected compile_backend to be one of {sorted(backends)}, which torch.compile "
            f"knows here, got {plan.compile_backend!r}"
        )
