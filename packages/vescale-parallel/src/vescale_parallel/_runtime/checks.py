"""What parallelize refuses before it changes anything."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from vescale_parallel._plan.plan import ParallelPlan

from .engine import ParallelModule


def check_arguments(
    plan: object, model: object, optimizer_fn: object, lr_scheduler_fn: object
) -> None:
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"expected plan to be a ParallelPlan, got {type(plan).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy parameters; run it once before parallelizing it")
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


def check_supported(plan: ParallelPlan, model: nn.Module) -> None:
    """Refuse what this version has no code for."""
    asked = {
        "context_parallel.size > 1": plan.context_parallel.size > 1,
        "expert_parallel.size > 1": plan.expert_parallel.size > 1,
        "compile": plan.compile,
    }
    for name, wanted in asked.items():
        if wanted:
            raise ValueError(f"{name} is not available in this version; leave it out of the plan")
    parts = plan.data_parallel.size * plan.pipeline_parallel.microbatches
    names = {fqn: {base.__name__ for base in type(m).__mro__} for fqn, m in model.named_modules()}
    batch_norms = [fqn for fqn, bases in names.items() if "_BatchNorm" in bases]
    if plan.pipeline_parallel.size > 1 and parts > 1 and batch_norms:
        raise ValueError(
            f"{batch_norms[0]!r} normalizes over the batch, which a pipeline runs in {parts} "
            "parts one after the other; use pipeline_parallel.size 1, or another norm"
        )
    synced = [fqn for fqn, bases in names.items() if "SyncBatchNorm" in bases]
    if plan.data_parallel.size > 1 and synced:
        raise ValueError(
            f"{synced[0]!r} is a SyncBatchNorm, which exchanges statistics itself; use "
            "nn.BatchNorm1d, 2d or 3d: under data parallelism they normalize over the global batch"
        )
