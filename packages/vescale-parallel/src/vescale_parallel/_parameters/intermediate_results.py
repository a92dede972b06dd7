"""Results of a call that other results of it are computed from.

[Note: intermediate results] What a program gets are results that lead to public parameters, not
those that are in the graph of the call. So an image would not be computed from the latents that a
generator returns beside it (the length of StyleGAN's paths), and features would keep no gradient.
Each result has the intermediate ones that it is computed from for inputs, too. Where a backward
pass asks for the gradient of one, or a hook does, the later result computes it in a pass of its
own and hands it on. Gradients go on behind it through the later result as ever: so the
intermediate one passes on only what came to it beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import backward_pass, comes_to


class HandedGradient:
    """The gradient that later results have given one in the backward pass in progress."""

    def __init__(self) -> None:
        self._pass, self._sum = -1, None

    def add(self, grad: Tensor) -> None:
        """Take the part of a later result."""
        if self._pass != backward_pass():
            self._pass, self._sum = backward_pass(), None
        self._sum = grad if self._sum is None else self._sum + grad

    def taken_from(self, grad: Tensor | None) -> Tensor | None:
        """Return what came to the result in this pass without it."""
        handed = self._sum if self._pass == backward_pass() else None
        self._pass, self._sum = -1, None
        if grad is None or handed is None:
            return grad
        return None if grad is handed else grad - handed


@dataclass(frozen=True, eq=False)
class IntermediateResult:
    """A result, as one of those that later ones are computed from.

    Attributes:
        computed: It, in the graph of the call.
        public: It, as the program has it.
        handed: What it is given in a backward pass.
    """

    computed: Tensor
    public: Tensor
    handed: HandedGradient

    def is_wanted(self, *, all_run: bool) -> bool:
        """Whether the backward pass in progress has to come to it; ``all_run``: comes to all."""
        if all_run:
            return self.public.retains_grad or bool(self.public._backward_hooks)
        return comes_to(self.public.grad_fn)


@dataclass(frozen=True, eq=False)
class Sources:
    """The intermediate results that one result is computed from.

    Attributes:
        results: They.
        watched: Returns a gradient that has a graph as a program may have it.
    """

    results: Sequence[IntermediateResult] = ()
    watched: Callable[[Tensor], Tensor] = field(default=lambda grad: grad)

    def gradients(self, result: Tensor, grad: Tensor, *, all_run: bool) -> list[Tensor | None]:
        """Return the gradients of those that want one, of the gradient of the result."""
        found: list[Tensor | None] = [None] * len(self.results)
        wanted = [i for i, each in enumerate(self.results) if each.is_wanted(all_run=all_run)]
        if not wanted:
            return found
        made = torch.autograd.grad(
            result,
            [self.results[i].computed for i in wanted],
            grad,
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for i, each in zip(wanted, made, strict=True):
            # The type stub has no None, in spite of allow_unused.
            if each is not None:  # pyright: ignore[reportUnnecessaryComparison]
                found[i] = given = self.watched(each) if each.requires_grad else each
                self.results[i].handed.add(given)
        return found


def in_graph_order(results: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return results behind those that they are computed from, with these.

    None of them is a leaf. Graphs are searched no further back than the earliest result.
    """
    ordered = sorted(results, key=lambda result: _made(result.grad_fn))
    if len(ordered) < 2:
        return [(result, []) for result in ordered]
    at = {(result.grad_fn, result.output_nr): i for i, result in enumerate(ordered)}
    first = _made(ordered[0].grad_fn)
    sources: list[set[int]] = []
    for result in ordered:
        direct = _found_behind(result.grad_fn, at, first)
        sources.append(direct.union(*(sources[i] for i in direct)))
    return [
        (result, [ordered[i] for i in sorted(behind)])
        for result, behind in zip(ordered, sources, strict=True)
    ]


def _found_behind(node: Any, at: dict[tuple[Any, int], int], first: int) -> set[int]:
    """Return the results that lie nearest behind a node of the graph."""
    found, seen, left = set[int](), {node}, [node]
    while left:
        for edge in left.pop().next_functions:
            if edge in at:
                found.add(at[edge])
            elif edge[0] is not None and edge[0] not in seen and _made(edge[0]) >= first:
                seen.add(edge[0])
                left.append(edge[0])
    return found


def _made(node: Any) -> int:
    """Return which node of its thread's graphs one is; those of leaves are the last."""
    return node._sequence_nr()
