"""What autograd records of a distributed tensor: the ways into it, out of it, and between.

The gradient of a tensor that is partial is whole, so placements on the way back have Replicate
in place of Partial. The class is told of these functions, because they make tensors of it.

[Note: gradients with a graph] Under ``create_graph=True`` gradients are differentiated in turn, so
they go the same ways by the same functions. What a gradient of a gradient is, locally, is what the
tensor itself was: the placements of the tensor on the way in or out are those of its gradient's
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from vescale_dtensor._comm.emulation import is_emulated
from vescale_dtensor._layout.layout import Layout, Placements, layout, replicated, without_partial
from vescale_dtensor._torch_private import DISTRIBUTED

from .checks import check_local_shape
from .dtensor import DTensor, as_dtensor, gather, in_dtype, layout_of, redistributed, wrap
from .strides import as_laid_out
from .watched_memory import handed_out


class FromLocal(torch.autograd.Function):
    """A local part becomes a tensor; gradients flow back into the part."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        local: Tensor,
        made: Layout,
        wanted: Placements | None,
        stride: Sequence[int] | None,
    ) -> DTensor:
        ctx.mesh, ctx.placements = made.mesh, wanted or without_partial(made.placements)
        ctx.given, ctx.is_told = made.placements, wanted is not None
        return wrap(*as_laid_out(local.detach(), made, stride))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.is_told and any(map(_is_no_sum, ctx.given)):
            raise NotImplementedError(
                f"a term of {ctx.given} has another gradient than what the terms make up, which "
                "only terms of a sum share: redistribute the tensor from a sum, or say how to "
                "place the tensor's gradient, from_local(..., grad_placements=...), to take it "
                "as the term's"
            )
        if _has_graph(grad):
            placed = _gradient(grad, ctx.mesh).redistribute(placements=ctx.placements)
            return placed.to_local(grad_placements=ctx.given), None, None, None
        placed = redistributed(_gradient(grad, ctx.mesh), ctx.placements)
        return placed._local_tensor, None, None, None


class ToLocal(torch.autograd.Function):
    """A tensor becomes its local part; gradients of parts are placed as the caller says."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, wanted: Placements | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = layout_of(tensor)
        ctx.layout = made.placed(wanted or without_partial(made.placements))
        ctx.given = made.placements
        local = handed_out(tensor._local_tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # torch's own formulas take the shape of the rank that is shown for that of all.
        if is_emulated():
            check_local_shape(grad, ctx.layout.mesh, ctx.layout.placements, ctx.layout.shape)
        return _wrapped(grad, ctx.layout, ctx.given), None


class ToFull(torch.autograd.Function):
    """A tensor is gathered; its gradient is that of the full one, placed as it was."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, wanted: Placements | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = layout_of(tensor)
        ctx.target = without_partial(made.placements)
        ctx.layout = made.placed(wanted or replicated(made.mesh))
        return gather(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = _wrapped(grad, ctx.layout, replicated(ctx.layout.mesh))
        return _redistributed(whole, ctx.target), None


class Redistribute(torch.autograd.Function):
    """A tensor is placed otherwise; its gradient goes back to where it was."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        tensor: DTensor,
        placements: Placements,
        dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, without_partial(tensor.placements)
        ctx.sent_as, ctx.dtype = grad_dtype or tensor.dtype, tensor.dtype
        result = redistributed(in_dtype(tensor, dtype), placements)
        return wrap(result._local_tensor, layout_of(result)) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = _cast(_gradient(grad, ctx.mesh), ctx.sent_as)
        return _cast(_redistributed(sent, ctx.placements), ctx.dtype), None, None, None


def _is_no_sum(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op != "sum"


def _has_graph(grad: Tensor) -> bool:
    return grad.requires_grad and torch.is_grad_enabled()


def _wrapped(local: Tensor, made: Layout, given: Placements) -> DTensor:
    """Return a local gradient as a tensor, whose own gradient is placed as what was given."""
    if _has_graph(local):
        return cast(DTensor, FromLocal.apply(local, made, given, None))
    return wrap(*as_laid_out(local, made))


def _redistributed(grad: DTensor, placements: Placements) -> DTensor:
    if _has_graph(grad):
        return grad.redistribute(placements=placements)
    return redistributed(grad, placements)


def _cast(grad: DTensor, dtype: torch.dtype) -> DTensor:
    return cast(DTensor, grad.to(dtype)) if _has_graph(grad) else in_dtype(grad, dtype)


def _gradient(grad: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a gradient as a distributed tensor; a plain one is whole on every rank."""
    if isinstance(grad, DISTRIBUTED):
        return as_dtensor(grad)
    made = layout(mesh, replicated(mesh), grad.shape, None, grad.dtype)
    return _wrapped(grad, made, replicated(mesh))
