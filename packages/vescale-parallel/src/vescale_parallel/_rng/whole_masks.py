"""Dropout by a kernel that makes its own random numbers, of which a rank has a part."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .part_of_whole import Part

# Elements of a whole mask up to which a GPU makes all of it and keeps its part.
_MOST_NUMEL = 1 << 27


def dropout_of_whole(
    x: Tensor, p: float, part_of: Callable[[Tensor], Part]
) -> tuple[Tensor, Tensor]:
    """Keep this rank's part of the mask that a kernel makes for the whole.

    Raises:
        NotImplementedError: If that is too large.
    """
    mask = torch.empty_like(x, dtype=torch.bool)
    part = part_of(mask)
    if math.prod(part.shape) > _MOST_NUMEL:
        raise NotImplementedError("the whole mask is too large")
    ones = torch.empty_strided(part.shape, part.strides, dtype=x.dtype, device=x.device)
    whole = torch.ops.aten.native_dropout(ones.fill_(1), p, True)[1]
    for held in part.boxes:
        held.of(part.here).copy_(whole[held.box.slices])
    if p == 1:
        return torch.zeros_like(x), mask
    # In the precision of the kernel, which divides float32 for half precision.
    scale = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32)) / (1.0 - p)
    return x * mask * scale.item(), mask
