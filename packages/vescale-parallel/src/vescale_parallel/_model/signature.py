"""What tells one model from another, and one rank's copy of it from another's."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vescale_parallel._plan.plan import ModelSignature, ParallelPlan

from .blocks import numel_of


def model_signature(model: nn.Module) -> ModelSignature:
    """Return what identifies a model to a plan. Global shapes, so any rank says the same."""
    table = [
        (fqn, tuple(parameter.shape), str(parameter.dtype))
        for fqn, parameter in model.named_parameters()
    ]
    return ModelSignature(
        name=type(model).__name__,
        num_parameters=len(table),
        numel=numel_of(model),
        digest=hashlib.sha256(repr(table).encode()).hexdigest()[:16],
    )


def described_structure(model: nn.Module) -> dict[str, str]:
    """Return what must agree between ranks for them to hold copies of one model, by name."""
    described = {"its class": type(model).__name__}
    for fqn, parameter in model.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        described[f"parameter {fqn!r}"] = _geometry(parameter) + trained
    for fqn, buffer in model.named_buffers():
        described[f"buffer {fqn!r}"] = _geometry(buffer)
    return described


def _geometry(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "without a shape"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_signature(plan: ParallelPlan, model: nn.Module) -> None:
    """Raise if a plan was made for another model.

    Raises:
        ValueError: With both models' names and sizes.
    """
    if plan.model is None:
        return
    found = model_signature(model)
    if found != plan.model:
        detail = "" if str(found) != str(plan.model) else ", with other names, shapes or dtypes"
        raise ValueError(
            f"the plan was made for {plan.model}, got {found}{detail}; "
            "generate a plan for this model"
        )
