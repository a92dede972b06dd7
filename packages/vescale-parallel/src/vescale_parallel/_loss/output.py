"""Which scalar of a module's output is its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree

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


def scalars_of(output: Any) -> list[Tensor]:
    """Return the scalars among a module's outputs."""
    scalars = [leaf for leaf in pytree.tree_leaves(output) if is_loss(leaf)]
    if not scalars:
        raise ValueError(
            "pipeline parallelism and batch.gradient_accumulation need a module whose forward "
            "returns its loss (a scalar tensor, or a structure with one), "
            f"got {type(output).__name__}"
        )
    return scalars


def loss_of(output: Any) -> Tensor:
    """Return the loss among a module's outputs.

    It is what is called ``loss``, else the only scalar, else the only one with a gradient.

    Raises:
        ValueError: If there is none, or several might be it.
    """
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
            "none called 'loss'; return {'loss': ..., ...}, detach the others, or use "
            "pipeline_parallel.size 1 and batch.gradient_accumulation 1"
        )
    return candidates[0]


def only_scalars(output: Any, *, detach: bool) -> Any:
    """Return a module's output without other tensors, whose memory is then free.

    ``detach`` is for scalars whose graph is not needed.
    """

    def kept(leaf: Tensor) -> Tensor | None:
        if not is_loss(leaf):
            return None
        return leaf.detach() if detach else leaf

    return pytree.tree_map_only(Tensor, kept, output)


def marked_scalars(outputs: Sequence[Any], mean: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Return the structure of the micro-batches' outputs with scalars and no other tensors.

    ``mean`` returns the mean of one scalar over the global batch.
    """
    columns = [pytree.tree_leaves(output) for output in outputs]
    leaves, spec = pytree.tree_flatten(outputs[-1])
    loss = _reported_loss(outputs[-1])
    for index, leaf in enumerate(leaves):
        if is_loss(leaf):
            value = mean([column[index] for column in columns])
            leaves[index] = Scalar(value, leaf.dtype, leaf is loss, leaf.requires_grad)
        elif isinstance(leaf, Tensor):
            leaves[index] = None
    return pytree.tree_unflatten(leaves, spec)


def mean_of_parts(
    parts: Sequence[Tensor], total: Callable[[Tensor], Tensor], num_parts: int
) -> Tensor:
    """Return the mean of a scalar over the micro-batches of all data-parallel ranks, in float64.

    ``parts`` are this rank's; ``total`` sums over ranks, which have ``num_parts`` together.
    """
    values = torch.stack([part.detach() for part in parts])
    return total(values.to(torch.float64).sum()) / num_parts


def _reported_loss(output: Any) -> Tensor | None:
    """Return the loss; without gradients it need not be told from other scalars."""
    return loss_of(output) if torch.is_grad_enabled() else None
