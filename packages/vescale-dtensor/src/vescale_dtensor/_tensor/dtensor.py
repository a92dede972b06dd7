"""The distributed tensor: torch's DTensor with placements and operators that torch lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed.tensor as torch_dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale_dtensor._comm.emulation import coordinate_of
from vescale_dtensor._comm.failures import announce_alone
from vescale_dtensor._comm.functional import is_traced
from vescale_dtensor._layout.boxes import LocalBox, local_boxes
from vescale_dtensor._layout.layout import (
    Layout,
    Placements,
    layout,
    layout_of_spec,
    normalized,
    replicated,
    without_partial,
)
from vescale_dtensor._redistribute.execute import redistribute_local
from vescale_dtensor._torch_private import (
    DTensorBase,
    default_mesh,
    make_wrapper,
    new_dtensor,
    real_mesh,
)

from . import checks
from .checkpoint_hooks import CheckpointHooks
from .events import tell_redistribution
from .gradient_hooks import GradientHooks
from .infer_global_shape import infer_layout
from .pickled import Place, as_it_was, owned, place_of_shard
from .python_values import PythonValues
from .strides import are_alike, as_laid_out, dense_order, in_memory_order
from .watched_memory import handed_out


class DTensor(GradientHooks, CheckpointHooks, PythonValues, DTensorBase):
    """A tensor of global shape of which every rank holds the part its placements say.

    Shape, dtype and ``numel()`` are those of the global tensor on every rank. Operators give
    the values one device would give, or raise; :mod:`vescale_dtensor` says how.

    Attributes:
        rules: Runs an operator; set by :func:`vescale_dtensor._register.register_rules`,
            because the rules construct tensors of this class.
        unversioned: Returns ``data``; set there, too.
    """

    rules: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    unversioned: ClassVar[Callable[[DTensor], DTensor]]
    # What autograd records, see autograd.py; set there as well, and for the same reason.
    _FromLocal: ClassVar[type[torch.autograd.Function]]
    _ToLocal: ClassVar[type[torch.autograd.Function]]
    _ToFull: ClassVar[type[torch.autograd.Function]]
    _Redistribute: ClassVar[type[torch.autograd.Function]]
    # What this tensor is a view of, if it is one that had to be gathered; see gathered_views.py.
    _alias_of: Any = None
    # What it adds up to, if something is pending and was reduced or is a view; pending_sums.py.
    _sum: Any = None

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]: torch leaves it untyped
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return cls.rules(func, args, kwargs or {})
        except Exception as error:
            announce_alone(error)
            raise

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Wrap this rank's part of a global tensor; gradients flow back into the part.

        Without ``shape`` the ranks tell each other their local shapes, so every rank of the
        mesh must call this. Parts that are not those of an even cut are taken in rank order,
        and ``Shard`` becomes a :class:`RaggedShard` that says so.

        Args:
            local_tensor: This rank's part.
            device_mesh: The mesh the tensor lives on.
            placements: One per mesh axis, outermost first; ``Replicate`` if not given.
            run_check: Compare dtypes, strides and ``requires_grad`` of all ranks, and the values
                of those that are said to hold the same.
            shape: Global shape. Nothing is sent then.
            stride: Strides of the global tensor, given with its shape: the order of its dims in
                memory. A part in another order is copied; without it the part's own order holds.
            grad_placements: How the gradient is to be placed; as the tensor itself if not
                given, with ``Replicate`` in place of ``Partial``. Terms of an average, a product
                or an extreme have other gradients: theirs are refused, in backward, if not given.

        Raises:
            ValueError: If the local shapes fit no global tensor with these placements, or
                ``run_check`` finds ranks that differ.
        """
        mesh = device_mesh or default_mesh()
        # What moves elements would move them without the bits of conj().
        local_tensor = local_tensor.resolve_conj().resolve_neg()
        given = replicated(mesh) if placements is None else tuple(placements)
        checks.check_stride(shape, stride)
        if shape is None:
            shape, given = infer_layout(local_tensor, mesh, given)
        given = normalized(given, len(shape))
        checks.check_local_shape(local_tensor, mesh, given, shape)
        made = layout(mesh, given, shape, None, local_tensor.dtype)
        if run_check:
            checks.check_alike(local_tensor, as_laid_out(local_tensor.detach(), made, stride)[1])
            checks.check_replicas(local_tensor, made)
        if not (torch.is_grad_enabled() and local_tensor.requires_grad):
            return wrap(*as_laid_out(local_tensor.detach(), made, stride))
        wanted = _normalized_or_none(grad_placements, len(shape))
        return cast(DTensor, DTensor._FromLocal.apply(local_tensor, made, wanted, stride))

    def with_local(self, local_tensor: Tensor) -> DTensor:
        """Return a tensor that is cut as this one, with another part of this rank.

        As :meth:`from_local` without autograd, in less time if the part is laid out as this one's.
        """
        if are_alike(local_tensor, self._local_tensor):
            return new_dtensor(DTensor, local_tensor, self._spec, requires_grad=False)
        how = self.device_mesh, self.placements
        return DTensor.from_local(local_tensor.detach(), *how, shape=self.shape)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]: torch declares an attribute
        """The tensor without autograd, which does not see what is written to it either.

        Assigning to it is refused: torch would ignore it.
        """
        return type(self).unversioned(self)

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
        return checks.is_first_replica(coordinate_of(self.device_mesh), self.placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: as torch's
        """Return this rank's part; gradients flow back into the distributed tensor.

        Nothing is communicated, so that one rank may look at its part. A view that had to be
        gathered, of a tensor that was written since, is refused.

        Args:
            grad_placements: How to understand the gradients of the parts; as the tensor
                itself if not given, with ``Replicate`` in place of ``Partial``.
        """
        settled = self._settled(alone=True)
        if self._sum is not None:
            self._sum.give(self._local_tensor)
        if not (torch.is_grad_enabled() and self.requires_grad):
            return handed_out(settled._local_tensor)
        return cast(
            Tensor,
            DTensor._ToLocal.apply(settled, _normalized_or_none(grad_placements, self.ndim)),
        )

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: as torch's
        """Return the global tensor, on every rank. Every rank of the mesh must call this.

        Args:
            grad_placements: How to understand the gradients of the full tensors; whole on
                every rank if not given.
        """
        settled = self._settled()
        if not (torch.is_grad_enabled() and self.requires_grad):
            return handed_out(gather(settled))  # whole here: it is the memory itself
        return cast(
            Tensor, DTensor._ToFull.apply(settled, _normalized_or_none(grad_placements, self.ndim))
        )

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same tensor under other placements. Every rank of the mesh must call this.

        Args:
            device_mesh: Must be the tensor's own mesh, if given.
            placements: One per mesh axis, outermost first.
            async_op: Taken as torch takes it; the result is complete on return all the same.
            forward_dtype: What the parts are cast to before they are sent; the result has it.
            backward_dtype: The same for the gradient, which has the tensor's own dtype again then.

        Raises:
            ValueError: If the mesh is another one.
        """
        target = checks.target_of(self, device_mesh, placements)
        settled = self._settled()
        if torch.is_grad_enabled() and self.requires_grad:
            dtypes = forward_dtype, backward_dtype
            return cast(DTensor, DTensor._Redistribute.apply(settled, target, *dtypes))
        return redistributed(in_dtype(settled, forward_dtype), target)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        try:
            local = str(self._settled(alone=True)._local_tensor)
        except NotImplementedError:  # nobody expects printing to fail, or to communicate
            local = "<stale: what this is a gathered view of was written since>"
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"placements={self.placements}, local={local})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            copy = wrap(self._settled(alone=True)._local_tensor.detach().clone(), layout_of(self))
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        made, local = layout_of(self), self._settled(alone=True)._local_tensor.detach()
        state = made.mesh, made.placements, tuple(made.shape), made.stride, self.requires_grad
        kind = isinstance(self, nn.Parameter), place_of_shard(made, protocol)
        return rebuild, (local, *state, *kind)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return what a compiler takes this tensor apart into."""
        checks.check_of_one_rank(self._local_tensor)
        if self._alias_of is not None and not is_traced(self._local_tensor):
            raise NotImplementedError(
                f"a compiled program cannot be given {layout_of(self)}, which had to be gathered "
                "to be a view, or is the .data of a tensor: it would not follow what it is a view "
                "of. Give it view.clone(), or take the view inside of the program"
            )
        return super().__tensor_flatten__()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        # The third is a mesh where the base is our own, which keeps it there.
        placements, meta, third, requires_grad = flatten_spec
        local = inner_tensors["_local_tensor"]
        mesh = real_mesh(inner_tensors.get("device_mesh", third))
        made = layout(mesh, placements, outer_size, outer_stride, meta.dtype)
        return cast(DTensor, wrap(local, made).requires_grad_(requires_grad))

    def __coerce_tangent_metadata__(self) -> DTensor:
        """Return this gradient as a compiled backward pass expects it: nothing pending."""
        return redistributed(self, without_partial(self.placements))

    def __coerce_same_metadata_as_tangent__(
        self, flatten_spec: Any, expected_type: type | None = None
    ) -> DTensor | None:
        """Return this gradient where a compiled backward pass was told it would be."""
        return redistributed(self, flatten_spec[0]) if expected_type in (None, DTensor) else None

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled programs on disk are found by.

        They name groups of this rank and compute where its part begins, so they are its alone.
        """
        made = layout_of(self)
        groups = [group.group_name for group in made.mesh.get_all_groups()]
        place = made.mesh.get_coordinate(), groups
        known = (made.placements, made.shape, made.stride, made.dtype, place, self.requires_grad)
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def _settled(self, *, alone: bool = False) -> DTensor:
        """Bring a gathered view up to date with what it is a view of.

        Every rank of the mesh must call this, unless ``alone``: then it raises if it would have
        to communicate.
        """
        if self._alias_of is not None:
            self._alias_of.refresh(self, alone=alone)
        return self


def rebuild(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
    place: Place | None = None,
) -> DTensor:
    """Make a tensor that was pickled."""
    made = wrap(local, layout(owned(mesh, place), placements, shape, stride, local.dtype))
    return as_it_was(made, requires_grad=requires_grad, is_parameter=is_parameter)


def gather(tensor: DTensor) -> Tensor:
    """Return a copy of the global tensor without autograd. All ranks of the mesh call this."""
    local, made = tensor._local_tensor.detach(), layout_of(tensor)
    target = made.placed(replicated(made.mesh))
    tell_redistribution(made, target)
    full = redistribute_local(local, made.mesh, made.shape, made.placements, target.placements)
    return full.clone() if full is local else in_memory_order(full, made.stride)


def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    """Return ``tensor`` under other placements, without autograd; itself if they are the same."""
    made = layout_of(tensor)
    target = made.placed(placements)
    if target is made:
        return tensor
    tell_redistribution(made, target)
    local = redistribute_local(
        tensor._local_tensor, made.mesh, made.shape, made.placements, placements
    )
    return wrap(in_memory_order(local, made.stride), target)


def in_dtype(tensor: DTensor, dtype: torch.dtype | None) -> DTensor:
    """Return ``tensor`` with its parts cast, pending terms too, without autograd."""
    if dtype in (None, tensor.dtype):
        return tensor
    made, local = layout_of(tensor), tensor._local_tensor.to(dtype)
    stride = dense_order(made.shape, made.stride)
    return wrap(local, layout(made.mesh, made.placements, made.shape, stride, local.dtype))


def layout_of(tensor: torch_dtensor.DTensor) -> Layout:
    """Return where the elements of ``tensor`` are."""
    return layout_of_spec(tensor._spec)


def wrap(local: Tensor, made: Layout, *, offset: int = 0) -> DTensor:
    """Construct a DTensor without checks.

    ``offset`` is where the tensor would begin in its storage on one device; autograd of writes
    through views needs it.
    """
    if not offset:
        return new_dtensor(DTensor, local, made.spec, requires_grad=False)
    tensor = make_wrapper(
        DTensor,
        made.shape,
        strides=made.stride,
        storage_offset=offset,
        dtype=made.dtype,
        device=local.device,
        requires_grad=False,
    )
    tensor._spec, tensor._local_tensor = made.spec, local
    return tensor


def _normalized_or_none(placements: Sequence[Placement] | None, ndim: int) -> Placements | None:
    return None if placements is None else normalized(placements, ndim)


def as_dtensor(tensor: torch_dtensor.DTensor) -> DTensor:
    """Return torch's DTensor as one of ours that shares its local tensor."""
    if type(tensor) is DTensor:
        return tensor
    return wrap(tensor._local_tensor, layout_of_spec(tensor._spec))
