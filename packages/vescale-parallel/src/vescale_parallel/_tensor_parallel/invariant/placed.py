"""Memory that looks the same to a kernel on any number of ranks."""

from __future__ import annotations

from torch import Tensor

# torch allocates at multiples of it; kernels of CPUs take another path for other addresses.
_ALIGNMENT = 64


def placed(x: Tensor) -> Tensor:
    """Return the same in contiguous memory that begins where torch begins tensors."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
