"""Turn this rank's rows of tensors into distributed ones of the whole batch, and back.

With their gradients, see [Note: gradients of regions].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from vescale_dtensor import DTensor, is_sharded
from vescale_parallel._cross_replica.borders import MeanOfParts, Output, Rows
from vescale_parallel._parameters.memory_layout import dense_stride
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import is_on
from vescale_parallel._torch_private import pytree


class RowByRow(Protocol):
    """How rows are in the tensors of a module that takes and returns any number of them."""

    def rows_of_each(self, tensor: Tensor) -> Tensor:
        """Return what it takes or returns with the rows on the second of three dims."""
        ...

    def as_taken(self, rows_ENH: Tensor, num_dims: int) -> Tensor:
        """Return such rows as it takes them, in as many dims as those of a call if it may."""
        ...


class RowConverter:
    """Turns tensors into distributed ones and back.

    ``with_tp`` are the axes of data- and tensor-parallel ranks together.

    Attributes:
        num_rows: Of this rank's part of the batch.
    """

    def __init__(
        self, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, with_tp: DeviceMesh | None
    ) -> None:
        self._num_ranks, self._num_axes = mesh.size(), mesh.ndim
        self._mesh, self._tp_mesh = with_tp or mesh, tp_mesh
        self.num_rows = 0

    def is_inside(self, tensor: Tensor) -> bool:
        """Whether a tensor is distributed over the ranks that share the batch."""
        return is_on(tensor, self._mesh)

    def is_any_whole(self, tree: Any) -> bool:
        """Whether any tensor of a tree is."""
        return any(map(self._is_whole, pytree.tree_leaves(tree)))

    def divides(self, tree: Any, rows: Sequence[Output]) -> bool:
        """Whether every rank has equally many rows of tensors of the whole batch."""
        return all(
            leaf.shape[where.dim] % self._num_ranks == 0
            for leaf, where in zip(pytree.tree_leaves(tree), rows, strict=False)
            if isinstance(where, Rows) and self._is_whole(leaf)
        )

    def rows_made_inside(self, tree: Any, rows: Sequence[Output]) -> Any:
        """Return rows that code on the whole batch made of parameters alone as distributed ones.

        ``queries.expand(len(x), -1, -1)``, or the same log-determinant for every row: as many as
        the whole batch has, on every rank.
        """
        leaves, spec = pytree.tree_flatten(tree)
        if len(rows) != len(leaves):
            return tree
        made = [
            self.replicated(x) if isinstance(x, Tensor) and isinstance(where, Rows) else x
            for x, where in zip(leaves, rows, strict=True)
        ]
        return pytree.tree_unflatten(made, spec)

    def to_rows(self, tree: Any, rows: Sequence[Output]) -> Any:
        """Return this rank's parts as tensors of the whole batch."""
        leaves, spec = pytree.tree_flatten(tree)
        found = rows if len(rows) == len(leaves) else [None] * len(leaves)
        made = [
            self._whole(x, where) if isinstance(x, Tensor) else x
            for x, where in zip(leaves, found, strict=True)
        ]
        return pytree.tree_unflatten(made, spec)

    def whole_like(self, part: Tensor, rows: Tensor, where: Rows) -> Tensor:
        """Return tensors of ranks' parts as one of as many rows as another one has."""
        if torch.is_grad_enabled() and part.requires_grad:
            part = ScaledGradient.apply(part, self._num_ranks)  # pyright: ignore[reportAssignmentType]: torch's own stub
        over_tp = (Replicate(),) * (self._mesh.ndim - self._num_axes)
        placements = (where.placement(0, 0),) * self._num_axes + over_tp
        shape = [*part.shape]
        shape[where.dim] = rows.shape[where.dim]
        return DTensor.from_local(
            dense(part), self._mesh, placements, shape=shape, grad_placements=placements
        )

    def to_parts(self, tree: Any, rows: Sequence[Output], *, is_model: bool = False) -> Any:
        """Return tensors of the whole batch as this rank's parts, or whole where rows are not.

        Of what the model returns (``is_model``) the gradient of what all ranks hold is the same on
        all.
        """
        leaves, spec = pytree.tree_flatten(tree)
        found = rows if len(rows) == len(leaves) else [None] * len(leaves)
        made = [
            self._part(x, where, is_model=is_model) if self._is_whole(x) else x
            for x, where in zip(leaves, found, strict=True)
        ]
        return pytree.tree_unflatten(made, spec)

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks hold as a distributed one."""
        return self._whole(tensor, None)

    def as_held(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the whole batch as the plain one that every rank holds whole."""
        return self._part(tensor, None, is_model=False) if self._is_whole(tensor) else tensor

    def as_values(self, tensor: Tensor) -> Tensor:
        """Return the same without a gradient."""
        if not self._is_whole(tensor):
            return tensor
        with torch.no_grad():
            return tensor.full_tensor()

    def _is_whole(self, x: object) -> TypeGuard[DTensor]:
        return is_on(x, self._mesh)

    def _whole(self, tensor: Tensor, rows: Output) -> Tensor:
        if self._is_whole(tensor):
            return tensor
        if isinstance(rows, MeanOfParts):
            return self.mean(tensor)
        if not isinstance(rows, Rows):
            rows = None
        over_tp: tuple[Placement, ...] = (Replicate(),) if self._tp_mesh is not None else ()
        shape, local = list(tensor.shape), tensor
        if is_on(tensor, self._tp_mesh):
            over_tp, local = tensor.placements, tensor.to_local()
        placement: Placement = Replicate()
        if rows is not None:
            placement = rows.placement(shape[rows.dim], self.num_rows)
            shape[rows.dim] *= self._num_ranks
        # Kept as it is if it has no gradient: code may write to it, a buffer for example.
        if torch.is_grad_enabled() and local.requires_grad:
            local = dense(ScaledGradient.apply(local, self._num_ranks))
        return DTensor.from_local(
            local if rows is None else dense(local),
            self._mesh,
            (placement,) * self._num_axes + over_tp,
            shape=shape,
            grad_placements=(Partial() if rows is None else placement,) * self._num_axes + over_tp,
        )

    def mean(self, number: Tensor) -> DTensor:
        """Return the mean over the ranks that share the batch."""
        over_tp = (Replicate(),) * (self._mesh.ndim - self._num_axes)
        # Of the mean each rank's number is a part, but it has one device's gradient here.
        local = ScaledGradient.apply(number, self._num_ranks) / self._num_ranks
        placements = (Partial(),) * self._num_axes + over_tp
        return DTensor.from_local(local, self._mesh, placements, shape=number.shape)

    def _part(self, tensor: DTensor, rows: Output, *, is_model: bool) -> Tensor:
        if not isinstance(rows, Rows):
            rows = None
        over_tp = tensor.placements[self._num_axes :]
        is_cut_over_tp = any(map(is_sharded, over_tp))
        if not is_cut_over_tp:
            over_tp = (Replicate(),) * len(over_tp)
        placement: Placement = Replicate()
        if rows is not None:
            length = tensor.shape[rows.dim] // self._num_ranks
            placement = rows.placement(length, self.num_rows)
        grads: Placement = placement
        if rows is None and not is_model:
            grads = Partial()
        over_data = (placement,) * self._num_axes
        local = tensor.redistribute(placements=over_data + over_tp).to_local(
            grad_placements=(grads,) * self._num_axes + over_tp
        )
        if local.requires_grad and not (rows is None and is_model):
            local = ScaledGradient.apply(local, 1 / self._num_ranks)
        if not is_cut_over_tp:
            return local
        assert self._tp_mesh is not None
        shape = list(tensor.shape)
        if rows is not None:
            shape[rows.dim] //= self._num_ranks
        return DTensor.from_local(local, self._tp_mesh, over_tp, shape=shape)


def dense(part: Tensor) -> Tensor:
    """Return a tensor in dense memory, in the order that it is in.

    What is computed of it lies in that order, too, as on one device: in ``channels_last`` behind a
    convolution. Random numbers are drawn, and kernels chosen, by it.
    """
    if part.is_contiguous() or dense_stride(part) == part.stride():
        return part
    return part.contiguous()


# Functions that look up rows of a weight, of which they may limit the norms.
EMBEDDINGS = (nn.functional.embedding, nn.functional.embedding_bag)


class ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number.

    Where that is differentiated in turn, it is a tensor that crosses the same border on the way
    back, with another value on each side: see [Note: gradients of regions]. Of both conventions
    there the factor makes one, so gradients of gradients are the same, and have its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        # No view: what comes next may write to it in place, which autograd refuses for views
        # that a function like this one has made.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad.requires_grad and torch.is_grad_enabled():
            return _ScaledWithGraph.apply(grad, ctx.factor), None  # pyright: ignore[reportReturnType]
        return grad * ctx.factor, None


class _ScaledWithGraph(torch.autograd.Function):
    """A gradient multiplied by a number, whose own gradient is not."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        return grad * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ScaledGradient.apply(grad, ctx.factor), None  # pyright: ignore[reportReturnType]


def is_of_a_part(x: Tensor) -> bool:
    """Whether a plain tensor was made of what a region gave a module as this rank's part."""
    seen, waiting = set[Any](), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == f"{ScaledGradient.__name__}Backward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


def given_to_embedding(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that one of ``EMBEDDINGS`` is called with beside distributed tensors.

    Norms are limited of the weight itself, which the function would be given a copy of.

    Raises:
        ValueError: If bags have offsets that ranks have each of their own, with others behind.
    """
    indices, weight, *rest = args
    offsets = rest[0] if rest else named.get("offsets")
    if isinstance(offsets, DTensor) and any(map(is_sharded, offsets.placements)):
        raise ValueError(bounds_error("", "offsets of all ranks, one behind the other, are none"))
    if named.get("max_norm") is None:
        return named
    every = indices.full_tensor() if isinstance(indices, DTensor) else indices
    with torch.no_grad():
        norms = named["max_norm"], named["norm_type"]
        torch.embedding_renorm_(weight.detach(), every.contiguous(), *norms)
    return {**named, "max_norm": None}


def bounds_error(fqn: str, reason: str) -> str:
    """Return what is wrong with code over all rows that is given packed ones."""
    return (
        f"rows of the batch depend on each other in {fqn or 'the model'!r} ({reason}), which is "
        "given packed rows, or where they begin or end, and data-parallel ranks have others. Have "
        "a module of its own, nn.EmbeddingBag for example, make one vector of each row for it, or "
        "use data_parallel.size 1"
    )


def padded(
    data: Tensor, lengths_T: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return packed sequences side by side, and their lengths, as torch does for plain tensors.

    What torch's own function writes packed sequences into is plain, whatever these are.

    Args:
        data: One behind the other, those of each step together.
        lengths_T: How many sequences go on at each step; plain, as torch reads it from memory.
        batch_first: Whether sequences are the first dim, and not steps.
        padding: What is behind the end of one.
        total: Steps, at least.
    """
    sizes: list[int] = lengths_T.tolist()
    places_TN = torch.full((max(len(sizes), total), sizes[0]), sum(sizes))
    for step, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        places_TN[step, :size] = torch.arange(start, start + size)
    rows = torch.cat([data, torch.full_like(data[:1], padding)])
    made = rows[places_TN.flatten().to(data.device)].unflatten(0, places_TN.shape)
    return made.transpose(0, 1) if batch_first else made, (places_TN < sum(sizes)).sum(0)


AS_ARRAYS: Any = (DTensor.numpy, Tensor.__array__)


def as_array(func: Any, tensor: DTensor, *args: Any, **named: Any) -> Any:
    """Return the values of all rows, for a solver say; nobody may write to the tensor by them."""
    of_whole = Tensor.numpy if func is DTensor.numpy else func
    array = of_whole(tensor.full_tensor(), *args, **named)
    array.flags.writeable = False
    return array
