"""What collectives ask of their arguments before any communication."""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import Peers
from .primitives import shapes_of


def check_equal_shapes(tensor: Tensor, peers: Peers) -> None:
    """Raise if emulated ranks have tensors of several shapes."""
    if peers.emulated is None:  # what other processes have is not known
        return
    shapes = {tuple(shape) for shape in shapes_of(tensor, peers)}
    if len(shapes) > 1:
        raise ValueError(f"expected one shape on all ranks, got {sorted(shapes)}")


def check_out(out: Tensor, tensor: Tensor, shape: torch.Size, *, is_uneven: bool) -> None:
    """Raise if what a collective gives cannot be written to ``out``."""
    if is_uneven:
        raise ValueError("expected out or sizes, got both; out is for tensors of one shape")
    if out.shape != shape or out.dtype != tensor.dtype or not out.is_contiguous():
        raise ValueError(
            f"expected out to be contiguous, of shape {tuple(shape)} and {tensor.dtype}, "
            f"got shape {tuple(out.shape)} with strides {out.stride()} and {out.dtype}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor with out, got strides {tensor.stride()}")
    if torch.is_grad_enabled() and (tensor.requires_grad or out.requires_grad):
        raise ValueError("out has no gradients; detach it and the tensor, or call it without out")


def check_divisible(tensor: Tensor, peers: Peers) -> None:
    """Raise if dim 0 has no equal split for every rank."""
    check_equal_shapes(tensor, peers)
    if not tensor.ndim or tensor.shape[0] % peers.num_ranks:
        raise ValueError(
            f"expected dim 0 to be a multiple of {peers.num_ranks}, the number of ranks, "
            f"got shape {tuple(tensor.shape)}; pass splits"
        )
