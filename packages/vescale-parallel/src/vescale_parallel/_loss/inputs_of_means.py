"""Gradients of a call's inputs, where its loss is a mean over ranks.

A rank differentiates its own part of the loss, or, of one that all ranks compute together, what
averages to its gradient; gradients of parameters are averaged over ranks. A row is on one rank
alone, so the gradient of an input is divided by the number of ranks there, in passes that come
from such a mean. What comes from results with rows alone, ``out.sum()`` for example, is of what
the program made of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import backward_pass, pytree

Args = tuple[Any, ...]
Named = dict[str, Any]


class InputsOfMeans:
    """The inputs of one call of which somebody wants the gradient.

    Args:
        num_parts: The ranks over which its results are means.
        told: Called with the gradient of each of them.
    """

    def __init__(self, num_parts: int, told: Callable[[Tensor], None] = lambda grad: None) -> None:
        self.num_parts, self._told, self._pass = num_parts, told, -1

    def note_mean(self, grad: Tensor) -> None:
        """The backward pass in progress comes from a mean over ranks, which has this gradient."""
        self._pass = backward_pass()
        self._told(grad)

    def comes_from_mean(self) -> bool:
        """Whether it does."""
        return self._pass == backward_pass()

    def note_results(self, output: Any, with_rows: Sequence[bool]) -> None:
        """Have backward passes from what was made of the batch of all ranks count as such.

        ``with_rows`` says of every leaf whether it is this rank's rows, as far as that is known.
        """
        leaves = pytree.tree_leaves(output)
        if len(with_rows) != len(leaves):
            with_rows = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves]
        for leaf, has_rows in zip(leaves, with_rows, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not has_rows:
                leaf.register_hook(self.note_mean)

    def watched(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Sequence[object] | None
    ) -> tuple[Args, Named]:
        """Return arguments whose gradients are one device's.

        ``rows`` says of every leaf where its rows are, None if it has none; or is None if that is
        not known. What another module computed has gradients that are averaged like a parameter's,
        what the program made of rows alone (``x + perturbation``) those of rows.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        has_rows = [True] * len(leaves) if rows is None else [each is not None for each in rows]
        if not any(map(_is_wanted, leaves)):
            return tuple(args), dict(kwargs)
        watched = [
            _InputOfMeans.apply(leaf, self) if has and _is_wanted(leaf) else leaf
            for leaf, has in zip(leaves, has_rows, strict=True)
        ]
        return pytree.tree_unflatten(watched, spec)


def _is_wanted(leaf: object) -> bool:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter | DTensor):
        return False
    return leaf.requires_grad and leaf.dim() > 0 and (leaf.is_leaf or _is_made_of_rows(leaf))


def _is_made_of_rows(made: Tensor) -> bool:
    """Whether all that a gradient through a tensor comes to has as many rows as it has."""
    seen, waiting = set[Any](), [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if isinstance(leaf, nn.Parameter | DTensor) or leaf.shape[:1] != made.shape[:1]:
            return False
    return True


class _InputOfMeans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, inputs: InputsOfMeans) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.inputs = inputs
        return given.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad / ctx.inputs.num_parts if ctx.inputs.comes_from_mean() else grad, None
