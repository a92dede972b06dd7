"""Raise where cut tensors would be gathered, for programs in which none should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.placements import is_sharded
from vescale_dtensor._tensor.events import Redistribution, redistributions_told


class GatherForbiddenError(RuntimeError):
    """A tensor would have been gathered inside :func:`forbid_gathers`."""


@contextmanager
def forbid_gathers(mesh: DeviceMesh, *, hint: str = "") -> Iterator[None]:
    """Raise instead of sending elements of tensors that are cut over a mesh.

    That is every change of a sharded placement: for an operator without a rule, for one whose
    rule needs the tensor cut otherwise, and for ``redistribute`` and ``full_tensor``. Pending
    reductions are carried out; they are what cut tensors are for. Unlike :func:`strict`, which
    minds only operators without a rule. Every rank of the mesh must enter alike.

    Args:
        mesh: Tensors on other meshes are left alone.
        hint: What to do about it, the end of the message.

    Raises:
        GatherForbiddenError: Before anything is sent.
    """

    def refuse(made: Redistribution) -> None:
        if made.source.mesh != mesh:
            return
        pairs = zip(made.source.placements, made.target.placements, strict=True)
        if any(is_sharded(before) and before != after for before, after in pairs):
            raise GatherForbiddenError(f"{made} would gather a cut tensor{hint and '; '}{hint}")

    with redistributions_told(refuse):
        yield
