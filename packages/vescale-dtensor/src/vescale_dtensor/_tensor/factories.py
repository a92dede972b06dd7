"""Make distributed tensors without a global one: every rank makes its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from vescale_dtensor._comm.emulation import drawing_from, per_rank
from vescale_dtensor._layout.boxes import local_boxes
from vescale_dtensor._layout.layout import Layout, layout, normalized, replicated
from vescale_dtensor._torch_private import default_mesh
from vescale_dtensor.random import Fill, Window, draw_part

from .dtensor import DTensor, wrap

_Size = int | Sequence[int]


def zeros(
    *size: _Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a distributed tensor of zeros.

    Args:
        size: Global shape, as integers or one sequence.
        dtype: torch's default if not given.
        layout: ``torch.strided``; there are no others.
        requires_grad: Whether autograd records what is done to it.
        device_mesh: The mesh to distribute over; that of an enclosing ``with mesh:`` if absent.
        placements: One per mesh axis, outermost first; ``Replicate`` if not given.
    """
    made = _layout(size, dtype, layout, device_mesh, placements)
    return _made(made, requires_grad, lambda local, _: local.zero_())


def ones(
    *size: _Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a distributed tensor of ones; see :func:`zeros`."""
    made = _layout(size, dtype, layout, device_mesh, placements)
    return _made(made, requires_grad, lambda local, _: local.fill_(1))


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a distributed tensor of one value; see :func:`zeros`."""
    dtype = dtype or torch.full((), fill_value).dtype
    made = _layout((size,), dtype, layout, device_mesh, placements)
    return _made(made, requires_grad, lambda local, _: local.fill_(fill_value))


def empty(
    *size: _Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a distributed tensor whose values are not set; see :func:`zeros`."""
    made = _layout(size, dtype, layout, device_mesh, placements)
    return _made(made, requires_grad, lambda local, _: local)


def rand(
    *size: _Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Return uniform numbers in [0, 1): those ``torch.rand`` draws on one device.

    Generators must be in the same state on every rank; see :func:`zeros` for the rest.
    """
    made = _layout(size, dtype, layout, device_mesh, placements)
    return _drawn(Fill("uniform_", (0.0, 1.0)), made, requires_grad, generator)


def randn(
    *size: _Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Return normal numbers: those ``torch.randn`` draws on one device; see :func:`rand`."""
    made = _layout(size, dtype, layout, device_mesh, placements)
    return _drawn(Fill("normal_", (0.0, 1.0)), made, requires_grad, generator)


def manual_seed(seed: int) -> torch.Generator:
    """Seed the generators of this rank; every rank must call this with the same seed.

    It is ``torch.manual_seed``: random operators draw parts of one sequence, so ranks need no
    generators of their own.
    """
    return torch.manual_seed(seed)


def _layout(
    size: Sequence[_Size],
    dtype: torch.dtype | None,
    kind: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Layout:
    if kind is not torch.strided:
        raise ValueError(f"expected layout=torch.strided, got {kind}")
    one = size[0] if len(size) == 1 else size
    shape = cast("tuple[int, ...]", (one,) if isinstance(one, int) else tuple(one))
    mesh = device_mesh or default_mesh()
    given = replicated(mesh) if placements is None else normalized(placements, len(shape))
    if len(given) != mesh.ndim or any(isinstance(p, Partial) for p in given):
        raise ValueError(
            f"expected one placement per mesh axis ({mesh.ndim}), none of them Partial, "
            f"got {given}"
        )
    return layout(mesh, given, shape, None, dtype or torch.get_default_dtype())


def _made(
    made: Layout,
    requires_grad: bool,
    fill: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> DTensor:
    device = made.mesh.device_type

    def part(coordinate: tuple[int, ...]) -> Tensor:
        local = torch.empty(made.local_shape(coordinate), dtype=made.dtype, device=device)
        return fill(local, coordinate)

    return cast(DTensor, wrap(per_rank(part, made.mesh), made).requires_grad_(requires_grad))


def _drawn(
    fill: Fill, made: Layout, requires_grad: bool, generator: torch.Generator | None
) -> DTensor:
    def draw(local: Tensor, coordinate: tuple[int, ...]) -> Tensor:
        boxes = local_boxes(made.shape, made.mesh.shape, coordinate, made.placements)
        window = Window(tuple(made.shape), made.stride, 0, made.dtype)
        draw_part(fill, window=window, boxes=boxes, out=local, generator=generator)
        return local

    with drawing_from(generator):
        return _made(made, requires_grad, draw)
