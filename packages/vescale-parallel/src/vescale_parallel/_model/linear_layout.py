"""Which dim of a weight is what, for the classes of linear layers that exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearKind:
    """Layout of a linear layer's weight.

    Attributes:
        out_dim: Weight dim of the output features.
        in_dim: Weight dim of the input features.
        out_attribute: Attribute that holds the number of output features.
        bias_optional: Whether forward accepts ``bias`` None.
    """

    out_dim: int
    in_dim: int
    out_attribute: str
    bias_optional: bool


_LINEAR = LinearKind(0, 1, "out_features", True)
# transformers' Conv1D (GPT-2): y = x @ weight + bias. Known by name, to need no import.
_CONV1D = LinearKind(1, 0, "nf", False)


def linear_kind(module: nn.Module) -> LinearKind | None:
    """Return the layout of a linear layer, None for any other module.

    A layer whose weight is computed from other parameters, by a parametrization or by a hook as
    of torch.nn.utils.weight_norm, has no weight to cut.
    """
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return _LINEAR
    named = {base.__name__ for base in type(module).__mro__}
    if "Conv1D" in named and hasattr(module, "nf"):
        return _CONV1D
    return None


def computes_plainly(module: nn.Module) -> bool:
    """Whether a linear layer's forward is known to be :func:`product`, and nothing else."""
    if "forward" in vars(module):
        return False
    owner = next((base for base in type(module).__mro__ if "forward" in vars(base)), None)
    is_conv1d = getattr(owner, "__qualname__", "") == "Conv1D"
    return owner is nn.Linear or (
        is_conv1d and getattr(owner, "__module__", "") == "transformers.pytorch_utils"
    )


def product(kind: LinearKind, x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a linear layer computes, with another weight and bias than its own."""
    if kind.out_dim == 0:
        return F.linear(x, weight, bias)
    assert bias is not None
    shape = (*x.shape[:-1], weight.shape[kind.out_dim])
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(shape)


def features(module: nn.Module, kind: LinearKind) -> tuple[int, int]:
    """Return (input features, output features) of a linear layer."""
    weight = module.get_parameter("weight")
    return weight.shape[kind.in_dim], weight.shape[kind.out_dim]


def linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that are linear layers, by name, in definition order."""
    return {n: child for n, child in module.named_children() if linear_kind(child) is not None}
