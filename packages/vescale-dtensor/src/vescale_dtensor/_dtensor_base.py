"""A base for DTensor where torch's own cannot be one.

Before torch 2.13 its C++ takes every instance of its DTensor class for one of its own and never
calls what a subclass defines. There ours has the same attributes, and is no subclass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement


class DTensorBase(Tensor):
    """What :class:`vescale_dtensor.DTensor` uses of torch's DTensor."""

    __slots__ = ["_local_tensor", "_spec"]
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    _local_tensor: Tensor
    _spec: Any

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per mesh axis, outermost first."""
        return self._spec.placements

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        spec = self._spec
        return ["_local_tensor"], (
            spec.placements,
            spec.tensor_meta,
            spec.mesh,
            self.requires_grad,
        )
