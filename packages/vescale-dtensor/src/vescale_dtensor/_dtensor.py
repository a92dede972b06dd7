"""The distributed tensor: torch's DTensor with placements that torch lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, ClassVar

import torch
import torch.distributed.tensor as torch_dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from ._collectives import all_gather_flat
from ._layout import LocalBox, local_boxes, local_shape
from ._placements import is_sharded
from ._torch_private import DTensorSpec, TensorMeta


class DTensor(torch_dtensor.DTensor):
    """A tensor of global shape of which every rank holds the boxes its placements say.

    Shape, dtype and ``numel()`` are those of the global tensor on every rank. Operators
    either give the values one device would give or raise; see :mod:`vescale_dtensor` for
    which run locally and which gather.

    Attributes:
        rules: Runs an operator; set by :func:`vescale_dtensor._register.register_rules`,
            because the rules construct tensors of this class.
    """

    rules: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]: torch leaves it untyped
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return cls.rules(func, args, kwargs or {})

    @staticmethod
    def from_local(  # pyright: ignore[reportIncompatibleMethodOverride]: the global shape is required here
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
    ) -> DTensor:
        """Wrap this rank's part of a global tensor. No communication, no copy, no autograd.

        Args:
            local_tensor: This rank's part, shaped as :func:`local_shape` says.
            device_mesh: The mesh the tensor lives on.
            placements: One per mesh axis, outermost first. ``Partial`` is refused.
            shape: Global shape.

        Raises:
            ValueError: If the local shape does not fit the global shape and placements.
        """
        if any(isinstance(placement, Partial) for placement in placements):
            raise ValueError(f"expected no Partial placement, got {tuple(placements)}")
        expected = local_shape(shape, device_mesh.shape, coordinate_of(device_mesh), placements)
        if tuple(local_tensor.shape) != expected:
            raise ValueError(
                f"expected a local tensor of shape {expected} for global shape "
                f"{tuple(shape)} and placements {tuple(placements)}, "
                f"got {tuple(local_tensor.shape)}"
            )
        return wrap(local_tensor, device_mesh, tuple(placements), torch.Size(shape))

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]: torch declares an attribute
        """The tensor without autograd. Assigning to it is refused: torch would ignore it."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError(
            "cannot replace the data of a distributed tensor; write into it, "
            "tensor.copy_(values) under torch.no_grad(). Convert a model's dtype or device "
            "before it is parallelized"
        )

    def local_boxes(self) -> tuple[LocalBox, ...]:
        """Return the boxes of the global tensor that this rank holds."""
        mesh = self.device_mesh
        return local_boxes(self.shape, mesh.shape, coordinate_of(mesh), self.placements)

    @property
    def is_first_replica(self) -> bool:
        """Whether no rank before this one, along replicated axes, holds the same elements."""
        coordinate = coordinate_of(self.device_mesh)
        return not any(
            index
            for index, placement in zip(coordinate, self.placements, strict=True)
            if not is_sharded(placement)
        )

    def to_local(self, **unsupported: Any) -> Tensor:
        """Return this rank's part; gradients flow back into the distributed tensor."""
        if unsupported:
            raise TypeError(f"to_local takes no options here, got {sorted(unsupported)}")
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        return _ToLocal.apply(self)  # pyright: ignore[reportReturnType]: apply is untyped

    def full_tensor(self, **unsupported: Any) -> Tensor:
        """Return the global tensor, on every rank. Every rank of the mesh must call this."""
        if unsupported:
            raise TypeError(f"full_tensor takes no options here, got {sorted(unsupported)}")
        if not (torch.is_grad_enabled() and self.requires_grad):
            return gather(self)
        return _ToFull.apply(self)  # pyright: ignore[reportReturnType]: apply is untyped

    def redistribute(  # pyright: ignore[reportIncompatibleMethodOverride]: fewer options than torch's
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """Return the same tensor under other placements. Every rank must call this.

        Gathers the tensor first; not differentiable.

        Raises:
            RuntimeError: If autograd would have to record it.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("redistribute is not differentiable; call it under no_grad")
        mesh = device_mesh or self.device_mesh
        return distribute_tensor(gather(self), mesh, placements or self.placements)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"placements={self.placements}, local={self._local_tensor})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            local = self._local_tensor.detach().clone()
            copy = wrap(local, self.device_mesh, self.placements, self.shape)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]


def distribute_tensor(
    tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Cut this rank's part out of a full tensor that every rank already holds.

    No communication: unlike torch's function of the same name, nothing is broadcast.

    Args:
        tensor: The global tensor, equal on every rank.
        device_mesh: The mesh to distribute over.
        placements: One per mesh axis, outermost first.
    """
    coordinate = coordinate_of(device_mesh)
    boxes = local_boxes(tensor.shape, device_mesh.shape, coordinate, placements)
    shape = local_shape(tensor.shape, device_mesh.shape, coordinate, placements)
    local = tensor.detach().new_empty(shape)
    for held in boxes:
        local[held.local_slices] = tensor.detach()[held.box.slices]
    return DTensor.from_local(local, device_mesh, placements, shape=tensor.shape)


def gather(tensor: DTensor) -> Tensor:
    """Return the global tensor without autograd. Every rank of the mesh must call this."""
    mesh, shape, placements = tensor.device_mesh, tensor.shape, tensor.placements
    axes = [axis for axis, placement in enumerate(placements) if is_sharded(placement)]
    local = tensor._local_tensor.detach()
    if not axes:
        return local.clone()
    own = coordinate_of(mesh)
    coordinates = [
        tuple(
            dict(zip(axes, indices, strict=True)).get(axis, own[axis]) for axis in range(mesh.ndim)
        )
        for indices in product(*(range(mesh.size(axis)) for axis in axes))
    ]
    shapes = [local_shape(shape, mesh.shape, c, placements) for c in coordinates]
    padded = local.new_empty(max(map(math.prod, shapes)))
    padded[: local.numel()] = local.reshape(-1)
    full = local.new_empty(shape)
    rows = all_gather_flat(padded, mesh, axes)
    for coordinate, part_shape, row in zip(coordinates, shapes, rows, strict=True):
        part = row[: math.prod(part_shape)].view(part_shape)
        for held in local_boxes(shape, mesh.shape, coordinate, placements):
            full[held.box.slices] = part[held.local_slices] if shape else part
    return full


def wrap(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Construct a DTensor without checks."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    meta = TensorMeta(shape, tuple(strides), local.dtype)
    construct: Any = DTensor  # torch declares its constructor to return its own class
    return construct(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's coordinate on ``mesh``.

    Raises:
        ValueError: If this rank is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of {mesh}")
    return tuple(coordinate)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layout = (tensor.device_mesh, tensor.placements, tensor.shape)
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return wrap(grad, *ctx.layout)


class _ToFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layout = (tensor.device_mesh, tensor.placements)
        return gather(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return distribute_tensor(grad, *ctx.layout)
