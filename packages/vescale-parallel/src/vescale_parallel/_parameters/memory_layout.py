"""Memory layouts of parameters: in what order their dims follow each other in memory.

[Note: memory layouts] What computes has the strides that the parameter has on one device:
``channels_last`` for example, or those of a transposed matrix. Flat buffers have elements in the
order of their indices all the same, for that is how shards are cut, written to checkpoints and
given to optimizers. So a parameter in another order is no view of what is gathered: it has memory
of its own, which is filled from the buffer; the buffer, which holds only such, is let go of then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Stride = tuple[int, ...]


def dense_stride(parameter: Tensor) -> Stride:
    """Return the strides of a parameter; where elements are apart, or repeated, those without."""
    like = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
    return torch.empty_like(like).stride()


def is_in_index_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of dense memory follow each other as their indices do."""
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def stride_of_part(part: Sequence[int], shape: Sequence[int], stride: Stride) -> Stride:
    """Return the strides of a part of a dense tensor, in dense memory with the same order.

    A part of other dims is a range of elements, of a number too, whose order is that of indices.
    """
    if tuple(part) == tuple(shape):
        return stride
    if len(part) != len(shape):
        return torch.empty(tuple(part), device="meta").stride()
    order = sorted(range(len(part)), key=lambda dim: (-stride[dim], dim))
    inner = {dim: order[at + 1 :] for at, dim in enumerate(order)}
    return tuple(math.prod(max(part[d], 1) for d in inner[dim]) for dim in range(len(part)))


def strided(flat: Tensor, shape: torch.Size, stride: Stride | None) -> Tensor:
    """Return 1-D memory as a tensor of so many elements; contiguous without a stride."""
    made = flat.view(shape)
    return made if stride is None or made.stride() == stride else flat.as_strided(shape, stride)
