"""How a distributed tensor is laid out, as one object per distinct layout.

[Note: interned layouts] Two tensors have equal layouts exactly if they have the same layout
object. So a layout is hashed and compared by identity, and looking up what an operator does to
tensors laid out like these costs no more than a dictionary lookup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._caches import forget_with_world, notice_world
from vescale_dtensor._torch_private import DTensorSpec, TensorMeta

from .boxes import local_shape

Placements = tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the elements of a global tensor are.

    Attributes:
        mesh: The ranks.
        placements: One per mesh axis, outermost first.
        shape: Global shape.
        stride: Strides that the tensor would have on one device.
        dtype: Of the elements.
        spec: The same for torch's DTensor.
    """

    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} {placements_text(self.placements)}"

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(type(placement) is Replicate for placement in self.placements)

    @cached_property
    def is_partial(self) -> bool:
        """Whether some reduction is pending."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the local tensor at ``coordinate``."""
        return local_shape(self.shape, self.mesh.shape, coordinate, self.placements)

    def placed(self, placements: Placements) -> Layout:
        """Return the layout of the same tensor under other placements."""
        if placements == self.placements:
            return self
        return layout(self.mesh, placements, self.shape, self.stride, self.dtype)

    def typed(self, dtype: torch.dtype) -> Layout:
        """Return the layout of the same tensor in another dtype."""
        if dtype == self.dtype:
            return self
        return layout(self.mesh, self.placements, self.shape, self.stride, dtype)


def layout(
    mesh: DeviceMesh,
    placements: Placements,
    shape: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
) -> Layout:
    """Return the one layout object that says this. ``stride`` None means contiguous."""
    if stride is None:
        stride = [math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape))]
    # A compiler's sizes may be symbols; layouts are integers, so it specializes.
    sizes, steps = tuple(map(int, shape)), tuple(map(int, stride))
    return _intern(_Same(_canonical(mesh)), placements, sizes, steps, dtype)


class InternedSpec(DTensorSpec):
    """The spec of a layout, which a compiled program is only good for.

    torch.compile asks the spec of an input whether a program it has fits, and leaves sizes out
    of the question: it takes them for symbols of the program. Layouts are integers, so here a
    program is of one global shape, and a tensor of another one is compiled anew.
    """

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return self is other or super()._check_equals(other)

    # Specs are interned with their layouts, and nothing in them changes.
    def __deepcopy__(self, memo: dict[int, object]) -> InternedSpec:
        return self


class _Same:
    """A mesh compared by identity: equal meshes of two process groups are not the same."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.mesh is other.mesh

    def __hash__(self) -> int:
        return id(self.mesh)


_meshes: dict[DeviceMesh, tuple[DeviceMesh, object]] = {}


def _canonical(mesh: DeviceMesh) -> DeviceMesh:
    """Return the first mesh seen that equals ``mesh`` and belongs to the same process group."""
    world = notice_world()
    found = _meshes.get(mesh)
    if found is None or found[1] is not world:
        found = _meshes[mesh] = (mesh, world)
    return found[0]


# All that are in use: the cache below forgets the least recent ones, and what an operator does
# is found by the identity of layouts.
_alive: WeakValueDictionary[Any, Layout] = WeakValueDictionary()


@lru_cache(maxsize=1 << 16)
def _intern(
    same: _Same,
    placements: Placements,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Layout:
    key = same, placements, shape, stride, dtype
    if (known := _alive.get(key)) is not None:
        return known
    size, mesh = torch.Size(shape), same.mesh
    spec = InternedSpec(mesh, placements, tensor_meta=TensorMeta(size, stride, dtype))
    made = Layout(mesh, placements, size, stride, dtype, spec)
    attach(spec, made)
    _alive[key] = made
    return made


forget_with_world(_intern.cache_clear)
forget_with_world(_meshes.clear)


def attach(spec: Any, made: Layout) -> None:
    """Let ``spec`` know its layout."""
    spec.layout = made


def layout_of_spec(spec: Any) -> Layout:
    """Return the layout of a spec, which torch may have made."""
    found = getattr(spec, "layout", None)
    if found is None:
        meta = spec.tensor_meta
        found = layout(spec.mesh, tuple(spec.placements), meta.shape, meta.stride, meta.dtype)
        attach(spec, found)
    return found


def normalized(placements: Sequence[Placement], ndim: int) -> Placements:
    """Return the placements with dims counted from the front."""
    return tuple(
        Shard(placement.dim + ndim)
        if type(placement) is Shard and placement.dim < 0
        else placement
        for placement in placements
    )


def replicated(mesh: DeviceMesh) -> Placements:
    """Return placements that give the whole tensor to every rank."""
    return (Replicate(),) * mesh.ndim


def without_partial(placements: Placements) -> Placements:
    """Return the placements of a gradient: whole where the tensor is partial."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def placements_text(placements: Placements) -> str:
    """Return placements in short: ``(R, S(0))``."""
    return f"({', '.join(map(_short, placements))})"


def _short(placement: Placement) -> str:
    match placement:
        case Replicate():
            return "R"
        case Partial(reduce_op=reduce_op):
            return f"P({reduce_op})"
        case _ if type(placement) is Shard:
            return f"S({placement.dim})"
        case _:
            return repr(placement)
