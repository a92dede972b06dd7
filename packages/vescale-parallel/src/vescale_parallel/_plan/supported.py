"""What this version has no code for: in a plan, and in a model under any plan."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import list_backends

from .operators import checked_overloads
from .plan import ParallelPlan

# What other libraries make of a module, by the name of its class, and what to do instead.
_WRAPPED = {
    "OptimizedModule": (
        "is what torch.compile made of a module; parallelize the module (._orig_mod), then "
        "compile it: model = torch.compile(vescale.parallelize(plan, model))"
    ),
    "DataParallel": "runs threads over GPUs; give parallelize the plain module (.module)",
    "FullyShardedDataParallel": "shards already; give parallelize the plain module instead",
    "FSDPModule": "is sharded by fully_shard already; give parallelize the plain module instead",
    "DeepSpeedEngine": "is DeepSpeed's engine; give parallelize the plain module (.module)",
}


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


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model is, or has, a module that is none as it was written, which no plan runs.

    Raises:
        ValueError: Naming it, and what to give instead.
    """
    for fqn, module in model.named_modules():
        which = f"{fqn!r}" if fqn else "the model"
        # By name, as the libraries need not be imported.
        wrapped = [base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPED]
        if wrapped:
            raise ValueError(f"{which} is a {wrapped[0]}, which {_WRAPPED[wrapped[0]]}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{which} is a ScriptModule, whose parts cannot be changed; "
                "give parallelize the module that it was scripted from"
            )
