"""When a result is what it should be, but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_of(whole: Tensor) -> float:
    """Return the largest magnitude of a result, by which differences of its parts are judged."""
    return float(whole.abs().max()) if whole.numel() else 0.0


def close(found: Tensor, expected: Tensor, largest: float) -> bool:
    """Return whether a part is what it should be; ``largest`` is that of the whole."""
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return False
    if not found.is_complex():
        found, expected = found.double(), expected.double()
    return torch.allclose(
        found, expected, rtol=1e-9, atol=1e-10 * (largest + 1e-3), equal_nan=False
    )
