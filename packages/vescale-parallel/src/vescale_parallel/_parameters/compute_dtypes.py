"""The dtypes that parameters have in forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def compute_dtypes(model: nn.Module, wanted: torch.dtype | None) -> dict[int, torch.dtype]:
    """Return the dtype in which each parameter computes, by its identity.

    Those of a module with running statistics keep theirs: statistics are not cast, and torch's
    batch norm takes inputs of half precision with weights of the dtype of statistics, and no
    others.

    Args:
        model: That has the parameters.
        wanted: That of floating-point ones; None for each one's own.
    """
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
        for parameter in module.parameters(recurse=False)
    }
    return {
        id(each): wanted
        if wanted is not None and each.is_floating_point() and id(each) not in kept
        else each.dtype
        for each in model.parameters()
    }
