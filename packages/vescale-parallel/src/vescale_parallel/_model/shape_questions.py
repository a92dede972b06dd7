"""What may be asked of a tensor whose values are not there."""

from __future__ import annotations

from torch import Tensor

# All of it is known without values, and no use of them.
SHAPE_QUESTIONS = {
    Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]: a C descriptor
    Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.requires_grad.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_leaf.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_cuda.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.layout.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
