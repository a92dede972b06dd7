"""Memory that looks the same to a kernel on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch allocates at multiples of it; kernels of CPUs take another path for other addresses.
_ALIGNMENT = 64


def placed(x: Tensor) -> Tensor:
    """Return the same in contiguous memory that begins where torch begins tensors."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def begins_alike(nbytes: int) -> bool:
    """Whether pieces of so many bytes, one behind the other, begin where torch begins tensors."""
    return nbytes % _ALIGNMENT == 0


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return placed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return placed(grad)


def in_place_of_its_own(x: Tensor) -> Tensor:
    """Return the same as :func:`placed` does, and have its gradient placed so."""
    found: Any = _Placed.apply(x)
    return found
