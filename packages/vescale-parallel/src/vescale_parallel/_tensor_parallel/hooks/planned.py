"""What gives hooks whole activations under a plan."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.mesh import axis_group
from vescale_parallel._tensor_parallel.conversions import Boundary

from .agreed import AgreedHooks
from .axis import Axis
from .whole_activations import FindsLayouts, OverTensorParallel
from .whole_for_hooks import WholeForHooks


def planned_hooks(
    model: nn.Module, mesh: DeviceMesh, boundary: Boundary | None, guard: FindsLayouts | None
) -> WholeForHooks | None:
    """Return it; None if ranks have whole activations. Every rank must call this.

    Args:
        model: The model, changed as a plan says.
        mesh: The plan's.
        boundary: That activations cross between tensor-parallel ranks.
        guard: Knows how they lie over these.
    """
    axes: list[tuple[Axis, AgreedHooks]] = []
    tp = axis_group(mesh, "tp")
    if tp is not None and boundary is not None and guard is not None:
        axes.append((OverTensorParallel(boundary.ranks, guard), AgreedHooks(tp)))
    return WholeForHooks(model, axes) if axes else None
