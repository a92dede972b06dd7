"""Which dim of a weight is what, for the classes of linear layers that exist."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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


def features(module: nn.Module, kind: LinearKind) -> tuple[int, int]:
    """Return (input features, output features) of a linear layer."""
    weight = module.get_parameter("weight")
    return weight.shape[kind.in_dim], weight.shape[kind.out_dim]


def linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that are linear layers, by name, in definition order."""
    return {n: child for n, child in module.named_children() if linear_kind(child) is not None}
