"""Where backward of a pipeline begins: at the last stage's loss, or at what forward returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vescale_parallel._loss.output import refuse_closed
from vescale_parallel._torch_private import pytree


class Roots(Protocol):
    """Tensors of the last stage that are differentiated, and their gradients."""

    def of(self, output: Any) -> Sequence[Tensor]:
        """Return those of a micro-batch, given what the module returned."""
        ...

    def with_grads(
        self, roots: Sequence[Tensor], microbatch: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return what backward of a micro-batch begins with: tensors, and the gradient of each."""
        ...


@dataclass(frozen=True)
class LossRoots:
    """The loss that forward returned, as a loop over micro-batches accumulates it.

    Attributes:
        loss_of: Returns it.
        shares: Of the rows of the batch, that every micro-batch has.
        scale: What the loss is multiplied with before it is differentiated.
    """

    loss_of: Callable[[Any], Tensor]
    shares: Sequence[float] | int
    scale: float

    def of(self, output: Any) -> Sequence[Tensor]:
        return [self.loss_of(output)]

    def with_grads(
        self, roots: Sequence[Tensor], microbatch: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        parts = [self._share_of(loss, microbatch) for loss in roots]
        return parts, [torch.full_like(part, self.scale) for part in parts]

    def _share_of(self, loss: Tensor, microbatch: int) -> Tensor:
        if isinstance(self.shares, int):
            return loss / self.shares
        return loss * self.shares[microbatch]


@dataclass(eq=False)
class OutputRoots:
    """All that forward returned with a graph; the program has computed its loss from that.

    Attributes:
        grads: Of every micro-batch, what the roots' gradients are, None for those that the
            program did not use; known once it calls backward.
    """

    grads: Sequence[Sequence[Tensor | None]] = field(default=())

    def of(self, output: Any) -> Sequence[Tensor]:
        refuse_closed(output)
        return tensors_with_graph(output)

    def with_grads(
        self, roots: Sequence[Tensor], microbatch: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        pairs = zip(roots, self.grads[microbatch], strict=True)
        used = [(root, grad) for root, grad in pairs if grad is not None]
        return [root for root, _ in used], [grad for _, grad in used]


@dataclass(frozen=True)
class NoRoots:
    """Nothing is differentiated: a call without gradients."""

    def of(self, output: Any) -> Sequence[Tensor]:
        return ()

    def with_grads(
        self, roots: Sequence[Tensor], microbatch: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return (), ()


def tensors_with_graph(output: Any) -> list[Tensor]:
    """Return the tensors of a structure that depend on parameters, in order."""
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
