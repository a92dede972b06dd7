"""What tells one model from another, and one rank's copy of it from another's."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from vescale_parallel._plan.plan import ModelSignature, ParallelPlan


def model_signature(model: nn.Module) -> ModelSignature:
    """Return what identifies a model to a plan. Global shapes, so any rank says the same."""
    table = [
        (fqn, tuple(parameter.shape), str(parameter.dtype))
        for fqn, parameter in model.named_parameters()
    ]
    return ModelSignature(
        name=type(model).__name__,
        num_parameters=len(table),
        numel=sum(parameter.numel() for parameter in model.parameters()),
        digest=hashlib.sha256(repr(table).encode()).hexdigest()[:16],
    )


def described_values(model: nn.Module) -> dict[str, str]:
    """Return what must agree between ranks for them to hold one and the same model.

    Returns:
        ``parameter_values``: a sum of every tensor that exists; ``random_state``: of the
        default generator, from which deferred tensors get their values and forward its seeds.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = [(fqn, float(_sum(tensor))) for fqn, tensor in tensors if type(tensor) in _REAL]
    state = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()[:16]
    return {"parameter_values": repr(sums), "random_state": state}


_REAL = (torch.Tensor, nn.Parameter)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return torch.zeros(())
    return (
        tensor.detach().sum(dtype=torch.complex128 if tensor.is_complex() else torch.float64).abs()
    )


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
