"""Which elements of a storage is a tensor? Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """A strided view of a storage, in elements of ``dtype``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Window:
        """Return the window that ``tensor`` is on its storage."""
        return cls(
            tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements are all different and leave no gap."""
        return _are_without_gaps(sorted(zip(self.stride, self.shape, strict=True)))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without a gap."""
        return _are_without_gaps([*zip(self.stride, self.shape, strict=True)][::-1])

    @property
    def span(self) -> int:
        """Number of elements from the first to the last, with the gaps in between."""
        steps = zip(self.stride, self.shape, strict=True)
        return 1 + sum(stride * (size - 1) for stride, size in steps) if self.numel else 0

    def covers(self, nbytes: int) -> bool:
        """Whether the window is all of a storage of ``nbytes``."""
        return self.is_dense and self.numel * self.dtype.itemsize == nbytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that is this window on ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def _are_without_gaps(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether dims, (stride, size) from the innermost on, are as those of a dense tensor."""
    expected = 1
    for stride, size in dims:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_order(window: Window) -> tuple[int, ...]:
    """Return the strides of elements counted in the order of the memory, gaps left out.

    Raises:
        NotImplementedError: If elements share memory.
    """
    strides = [0] * len(window.shape)
    count, extent = 1, 1
    for dim in sorted(range(len(window.shape)), key=lambda dim: window.stride[dim]):
        stride, size = window.stride[dim], window.shape[dim]
        if size > 1:
            if stride < extent:
                raise NotImplementedError(f"elements of {window} share memory")
            strides[dim] = count
            count *= size
            extent += stride * (size - 1)
    return tuple(strides)
