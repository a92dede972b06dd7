"""Which scalar of a module's output is its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._torch_private import pytree

from .aligned import Aligned
from .not_returned import NotReturned, Where

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Scalar:
    """A scalar of the output of a pipeline's last stage, as all stages are told.

    Attributes:
        value: Its mean over the global batch; a tensor where reading it would wait for a device.
        dtype: Of the tensor.
        is_loss: Whether it is what the schedule differentiated.
        requires_grad: Whether it depends on parameters.
    """

    value: float | Tensor
    dtype: torch.dtype
    is_loss: bool
    requires_grad: bool

    def tensor(self, device: str) -> Tensor:
        """Return it as a tensor without a gradient."""
        # From float64, however it was held: one rounding.
        return torch.as_tensor(self.value, dtype=torch.float64).to(device, self.dtype)


def is_loss(leaf: object) -> bool:
    """Whether a value in a module's output may be a loss: a floating-point scalar tensor."""
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()


def refuse_closed(output: Any, *, has_graph: bool = True) -> None:
    """Refuse an object whose tensors are not found, if a loss can only be one of them.

    With ``has_graph`` False tensors were computed without a graph, since no loss was found.

    Raises:
        TypeError: If forward returned an object of a class that pytree does not open, such as a
            dataclass of one's own, and no other tensor that has a graph.
    """
    leaves = pytree.tree_leaves(output)
    if any(isinstance(leaf, Tensor) and (leaf.requires_grad or not has_graph) for leaf in leaves):
        return
    for leaf in leaves:
        held = () if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
        tensors = [each for each in held if isinstance(each, Tensor)]
        if isinstance(leaf, Iterator):
            raise TypeError(
                "expected forward to return tensors, alone or in tuples, lists and dicts, got a "
                f"{type(leaf).__name__}, which computes or hands out what is in it after the "
                "call: return a list of it"
            )
        if any(each.requires_grad or (not has_graph and is_loss(each)) for each in tensors):
            name = type(leaf).__name__
            raise TypeError(
                f"expected forward to return tensors, alone or in tuples, lists and dicts, got a "
                f"{name}, in which torch does not look for any: return a dict, a NamedTuple or a "
                "dataclass, or say once what it holds, "
                f"torch.utils._pytree.register_pytree_node({name}, ...)"
            )


def scalars_of(output: Any) -> list[Tensor]:
    """Return the scalars among a module's outputs."""
    refuse_closed(output)
    scalars = [leaf for leaf in pytree.tree_leaves(output) if is_loss(leaf)]
    if not scalars:
        raise ValueError(
            "pipeline parallelism and batch.gradient_accumulation need a module whose forward "
            "returns its loss (a scalar tensor, or a structure with one), "
            f"got {type(output).__name__}"
        )
    return scalars


def loss_of(output: Any, name: str | int | None = None) -> Tensor:
    """Return the loss among a module's outputs.

    It is what the plan says: the attribute or key ``name``, or the place in a tuple. With None it
    is what is called ``loss``, else the only scalar, else the only one with a gradient.

    Raises:
        ValueError: If there is none, or several might be it.
    """
    if name is not None:
        return _named_loss(output, name)
    scalars = scalars_of(output)
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and is_loss(named):
        return named
    differentiable = [scalar for scalar in scalars if scalar.requires_grad]
    candidates = scalars if len(scalars) == 1 else differentiable
    if len(candidates) != 1:
        raise ValueError(
            "pipeline parallelism and batch.gradient_accumulation differentiate one scalar of "
            f"what forward returns, its loss, but {type(output).__name__} holds "
            f"{len(scalars)} scalars, {len(differentiable)} of them with a gradient, and "
            "none called 'loss'; name it by pipeline_parallel.loss, a key, an attribute or a "
            f"place in a tuple, here one of {_scalar_names(output)}, return {{'loss': ..., ...}}, "
            "or detach the others"
        )
    return candidates[0]


def _named_loss(output: Any, name: str | int) -> Tensor:
    if isinstance(name, int):
        parts: Any = [*output.values()] if isinstance(output, Mapping) else output
        has_it = isinstance(parts, list | tuple) and -len(parts) <= name < len(parts)
        found: Any = parts[name] if has_it else None
    else:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if not is_loss(found):
        held = f"with the scalars {_scalar_names(output)}" if _scalar_names(output) else "without"
        raise ValueError(
            f"expected forward to return a scalar {name!r}, which pipeline_parallel.loss names "
            f"as the loss, got {type(output).__name__} {held}"
        )
    return found


def _scalar_names(output: Any) -> list[str]:
    leaves = pytree.tree_leaves(output)
    return [name for name, leaf in zip(leaf_names(output), leaves, strict=True) if is_loss(leaf)]


def loss_called(name: str | int | None) -> Callable[[Any], Tensor]:
    """Return :func:`loss_of` for what a plan calls the loss."""
    return functools.partial(loss_of, name=name)


def only_scalars(output: Any, where: Where) -> Any:
    """Return a module's output without other tensors and without a graph: both would be kept.

    ``where`` says why tensors are not there.
    """
    leaves, spec = pytree.tree_flatten(output)
    names: list[str] = []
    for index, leaf in enumerate(leaves):
        if is_loss(leaf):
            leaves[index] = without_graph(leaf)
        elif isinstance(leaf, Tensor):
            names = names or leaf_names(output)
            leaves[index] = NotReturned(names[index], where)
    return pytree.tree_unflatten(leaves, spec)


def without_graph(leaf: Tensor) -> Tensor:
    """Return a tensor that still says whether it depends on parameters."""
    return leaf.detach().requires_grad_(leaf.requires_grad)


def marked_scalars(
    outputs: Sequence[Any],
    mean: Callable[[Sequence[Tensor]], Tensor],
    loss_of: Callable[[Any], Tensor],
) -> Any:
    """Return the structure of the micro-batches' outputs, which have scalars and no other tensors.

    ``mean`` returns the mean of one scalar over the global batch.
    """
    aligned = Aligned.of(outputs)
    leaves, spec = pytree.tree_flatten(aligned.fullest)
    loss = loss_of(aligned.fullest)
    for index, leaf in enumerate(leaves):
        if is_loss(leaf):
            value = mean(aligned.of_all(index, len(outputs)))
            leaves[index] = Scalar(value, leaf.dtype, leaf is loss, leaf.requires_grad)
    return pytree.tree_unflatten(leaves, spec)


def mean_of_parts(
    parts: Sequence[Tensor],
    total: Callable[[Tensor], Tensor],
    num_parts: int,
    shares: Sequence[float] | None = None,
) -> Tensor:
    """Return the mean of a scalar over the micro-batches of all data-parallel ranks, in float64.

    ``parts`` are this rank's; ``total`` sums over ranks, which have ``num_parts`` together.
    ``shares`` are those of a rank's rows that its micro-batches have, None for equal ones.
    """
    values = torch.stack([part.detach() for part in parts]).to(torch.float64)
    if shares is not None:
        weights = torch.tensor(shares, dtype=torch.float64, device=values.device)
        values = values * (weights * len(parts))
    return total(values.sum()) / num_parts
