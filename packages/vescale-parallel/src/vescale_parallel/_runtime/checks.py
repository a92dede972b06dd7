"""What parallelize refuses before it changes anything."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from vescale_parallel._plan.plan import ParallelPlan

from .module import ParallelModule


def check_arguments(
    plan: object, model: object, optimizer_fn: object, lr_scheduler_fn: object
) -> None:
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"expected plan to be a ParallelPlan, got {type(plan).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            "expected parameters that have a shape, got lazy ones (nn.LazyLinear, ..); run the "
            "model once, then parallelize it"
        )
    hooked = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"{hooked[0]!r} has a post-accumulate-grad hook, which would hang on a parameter that "
            "parallelize replaces; register it after parallelize"
        )
    if isinstance(model, ParallelModule):
        raise ValueError(
            f"{type(model).__name__} is parallelized already; give parallelize the plain module"
        )
    for name, value in (("optimizer_fn", optimizer_fn), ("lr_scheduler_fn", lr_scheduler_fn)):
        if value is not None and (isinstance(value, Optimizer) or not callable(value)):
            raise TypeError(f"expected {name} to be a function, got {type(value).__name__}")
    if lr_scheduler_fn is not None and optimizer_fn is None:
        raise ValueError("lr_scheduler_fn needs optimizer_fn, whose optimizer it schedules")
