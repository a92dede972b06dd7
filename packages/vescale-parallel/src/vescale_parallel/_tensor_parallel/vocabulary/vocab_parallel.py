"""What is sharded by vocabulary: rows of an embedding, and logits until they are reduced.

[Note: sharded logits] A head whose weight is cut by output features computes this rank's part of
the logits. Gathering them would make every rank hold, and send, tokens x vocabulary elements. So
they become a DTensor of the global shape, cut along the last dim, and what the model does with
them (slices, casts, soft caps, F.cross_entropy of any kind, z-losses) runs by the rules of
vescale_dtensor, which send a few numbers a token. Everything before the head is plain.

Three borders keep the two worlds apart:

- :func:`keep_sharded`, behind the head, from plain to distributed;
- :class:`LiftPlain`, where a plain tensor with a gradient meets logits (an auxiliary loss that
  is added, a learned scale): it is whole on every rank, and so must be its gradient. Logits that
  are written into a plain tensor (those of every step of a decoder, into ``torch.zeros``) are
  gathered;
- :func:`returned`, where the model returns: what is not cut any more, a loss above all, is plain
  for the caller. Logits stay distributed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor, Replicate, Shard, is_sharded
from vescale_parallel._model.code import writes_to_first
from vescale_parallel._tensor_parallel.chunks import part_sizes
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.sharding_spec import shard_dim
from vescale_parallel._torch_private import pytree


def keep_sharded(
    module: nn.Module, mesh: DeviceMesh, *, num_features: int, lift: LiftPlain | None = None
) -> None:
    """Have a module that returns this rank's shard of its features return a DTensor of them all.

    The features are cut as ``Shard`` cuts them, in the last dim, over the one axis of ``mesh``.
    ``num_features`` of all ranks need not divide into them. ``lift`` begins when the module has
    run.

    Nothing is sent, in forward or backward. Hooks that were there before see the DTensor.
    """

    def after(_: nn.Module, args: Any, output: Tensor) -> DTensor:
        if lift is not None:
            lift.begin()
        shape = (*output.shape[:-1], num_features)
        return DTensor.from_local(output, mesh, (Shard(output.ndim - 1),), shape=shape)

    module.register_forward_hook(after, prepend=True)


class LiftPlain(TorchFunctionMode):
    """Gives plain tensors that meet tensors of a mesh the gradient that they have on one device.

    A plain tensor is whole on every rank. Without this mode, what one rank's part of the logits
    does with it would come back as its gradient, without the parts of other ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._is_waiting = self._is_entered = False

    @contextlib.contextmanager
    def when_needed(self) -> Iterator[None]:
        """Let :meth:`begin` enter the mode, which costs time for every function, until the end."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            if self._is_entered:
                self._is_entered = False
                self.__exit__(None, None, None)

    def begin(self) -> None:
        """Enter the mode from here on, if somebody waits for that."""
        if self._is_waiting and not self._is_entered:
            self._is_entered = True
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        if func in _DIFFERENTIATE:
            return func(*given[0], **given[1])  # by tensors that are in the graph as they are
        if torch.is_grad_enabled() and self._is_on_any((*args, *given[1].values())):
            written = given[0][:1] if writes_to_first(func) else ()
            if written and not isinstance(written[0], DTensor):
                # Lifted, it would be another tensor: with the values, and no gradient of them.
                given = returned(given, self._mesh, gathers=True)
            else:
                given = pytree.tree_map_only(Tensor, lambda x: lifted(x, self._mesh), given)
        return func(*given[0], **given[1])

    def _is_on_any(self, values: Sequence[Any]) -> bool:
        """Whether a tensor of the mesh is among arguments, which may be lists of tensors."""
        for value in values:
            if isinstance(value, list | tuple):
                if any(is_on(each, self._mesh) for each in value):
                    return True
            elif is_on(value, self._mesh):
                return True
        return False


_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def lifted(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor that meets tensors of a mesh so that its gradient is one device's."""
    if isinstance(tensor, DTensor) or not tensor.requires_grad:
        return tensor
    return DTensor.from_local(tensor, mesh, (Replicate(),), shape=tensor.shape)


def returned(output: Any, mesh: DeviceMesh, *, gathers: bool = False) -> Any:
    """Return a model's output with what ranks of ``mesh`` have reduced as plain tensors.

    Tensors that are still cut stay as they are, unless ``gathers``. Every rank of ``mesh``
    must call this.
    """

    def is_meant(leaf: object) -> bool:
        return is_on(leaf, mesh) if gathers else _is_reduced(leaf, mesh)

    if not any(map(is_meant, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: Returned.apply(leaf) if is_meant(leaf) else leaf, output)


def is_on(leaf: object, mesh: DeviceMesh | None) -> TypeGuard[DTensor]:
    """Whether a value is a tensor distributed over ``mesh``."""
    return isinstance(leaf, DTensor) and leaf.device_mesh == mesh


def _is_reduced(leaf: object, mesh: DeviceMesh) -> bool:
    return is_on(leaf, mesh) and not any(map(is_sharded, leaf.placements))


class Returned(torch.autograd.Function):
    """A distributed tensor as a plain one that is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mesh = tensor.device_mesh
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DTensor.from_local(grad, ctx.mesh, (Replicate(),), shape=grad.shape)


def plain_gradient(grad: Tensor) -> Tensor | None:
    """Replace the gradient of a plain tensor that met logits outside of the model, as a hook."""
    return grad.full_tensor() if isinstance(grad, DTensor) else None


def shard_embedding_rows(
    module: nn.Embedding, boundary: Boundary, leaves: Placement | None, stack: str
) -> None:
    """Look up the rows of an embedding that are here, sum over ranks.

    Around forward and not in hooks, so that hooks of users see whole tokens and embeddings,
    whether they were added before or after.
    """
    ranks, own, dim = boundary.ranks, module.forward, shard_dim(leaves)
    sizes = part_sizes(module.num_embeddings, ranks.size)
    first, num_rows = sum(sizes[: ranks.rank]), sizes[ranks.rank]
    if module.padding_idx is not None:
        padding = module.padding_idx - first
        module.padding_idx = padding if 0 <= padding < num_rows else None

    @functools.wraps(own)
    def lookup(*args: Any, **kwargs: Any) -> Tensor:
        name = None if args else next(iter(kwargs))
        ids: Tensor = args[0] if name is None else kwargs[name]
        is_row = (ids >= 0) & (ids < sum(sizes))
        # What is no row on any rank stays, for the lookup to refuse.
        elsewhere = is_row & ((ids < first) | (ids >= first + num_rows))
        local = (ids - first).masked_fill(elsewhere, 0)
        if name is None:
            output = own(local, *args[1:], **kwargs)
        else:
            output = own(**{**kwargs, name: local})
        here = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return boundary.leave(here, dim, stack)

    module.forward = lookup
