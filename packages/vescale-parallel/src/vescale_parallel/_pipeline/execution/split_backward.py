"""A backward pass in two: the gradient of a stage's input first, those of its weights later.

[Note: how backward is split]
The graph of a stage is walked from its output. Nodes that lead to the stage's input are run
first, for that gradient alone, and keep what they hold for later. Where a weight enters such a
node (a matrix product, mostly) the gradient that arrives there is put aside. Later each of these
nodes is run again, for its weights alone: autograd computes only what is asked for, so that no
product is computed twice, and the sums into ``.grad`` are those of a whole backward pass, with its
hooks.

That needs nodes that may run twice, each with weights of its own. A graph with others (computed in
Python, with hooks on tensors, weights that enter in two places) runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._plan.recomputation import recomputes

_HOOKS = (Tensor.register_hook, Tensor.retain_grad)


class HookedNodes(TorchFunctionMode):
    """Notes which nodes of the graph get hooks while a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: set[Node] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _HOOKS and args[0].grad_fn is not None:
            self.nodes.add(args[0].grad_fn)
        return result


def split_refusal(plan: ParallelPlan) -> str | None:
    """Return why a plan computes gradients of inputs and weights together; None if apart."""
    if recomputes(plan.recompute):
        return f"recompute={plan.recompute!r} would run blocks again for each part"
    if plan.data_parallel.zero_stage == 3:
        return "data_parallel.zero_stage 3 frees weights behind the first part"
    if plan.pipeline_parallel.reduce_every == "microbatch":
        return "pipeline_parallel.reduce_every 'microbatch' reduces block after block"
    return None


@dataclass(eq=False)
class _Border:
    """A node where weights enter, and the gradients that have arrived there."""

    node: Node
    weights: tuple[Node, ...]
    grads: Sequence[Tensor | None] = ()


@dataclass(eq=False)
class SplitBackward:
    """The graph of one micro-batch through one stage, to be run in two passes.

    Attributes:
        refusal: Why it cannot be split, None if it can.
    """

    outputs: Sequence[Tensor]
    received: Sequence[Tensor]
    refusal: str | None = None
    _borders: list[_Border] = field(default_factory=list[_Border])

    @classmethod
    def of(
        cls, outputs: Sequence[Tensor], received: Sequence[Tensor], hooked: set[Node]
    ) -> SplitBackward:
        """Walk the graph of outputs; ``hooked`` are nodes with hooks of tensors."""
        split = cls(outputs, received)
        split.refusal = split._find_borders(hooked)
        return split

    def input_gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs; what they leave out is :meth:`weight_gradients`.

        ``grads`` are those of the outputs, None for a scalar's 1.
        """

        def put_aside(border: _Border) -> Callable[[tuple[Tensor | None, ...]], None]:
            def hook(grads: tuple[Tensor | None, ...]) -> None:
                border.grads = grads

            return hook

        handles = [each.node.register_prehook(put_aside(each)) for each in self._borders]
        try:
            found = torch.autograd.grad(
                self.outputs, self.received, grads, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        # Only what weights need is kept.
        self.outputs = self.received = ()
        return found

    def weight_gradients(self) -> None:
        """Add the gradients of the weights to theirs."""
        # From the output to the input, as a whole backward does.
        while self._borders:
            border = self._borders.pop()
            arrived = [(i, grad) for i, grad in enumerate(border.grads) if grad is not None]
            edges = [GradientEdge(border.node, i) for i, _ in arrived]
            weights: list[Any] = [node.variable for node in border.weights]  # pyright: ignore[reportAttributeAccessIssue]: nodes of leaves have it
            if edges:
                torch.autograd.backward(edges, [grad for _, grad in arrived], inputs=weights)

    def _find_borders(self, hooked: set[Node]) -> str | None:
        """Find where weights enter; return why that does not do, None if it does."""
        roots = [output.grad_fn for output in self.outputs if output.grad_fn is not None]
        leaves = {get_gradient_edge(each).node for each in self.received}
        if len(roots) < len(self.outputs):
            return "the stage returns what it is given"
        leads = {*leaves}
        weights: dict[Node, frozenset[Node]] = {}
        entered: set[Node] = set()
        for node in _children_first(roots):
            children = [child for child, _ in node.next_functions if child is not None]
            here = [weights[child] for child in children if child not in leads]
            if node not in leaves and not leads.intersection(children):
                own = [node] if hasattr(node, "variable") else []
                weights[node] = frozenset(own).union(*here)
                continue
            leads.add(node)
            found = frozenset[Node]().union(*here)
            if not found:
                continue
            if isinstance(node, BackwardCFunction):
                return f"weights enter {node.name()}, which is computed in Python"
            if node in hooked:
                return f"a hook is on what {node.name()} computes from weights"
            if entered & found:
                return "a weight is used in two places"
            entered |= found
            self._borders.append(_Border(node, tuple(found)))
        if leads.isdisjoint(roots):
            return "the stage does not use what it is given"
        beside = leads.issuperset(roots)
        return None if beside else "the stage computes something that it is given nothing for"


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph in an order in which all that one leads to come before it."""
    found: list[Node] = []
    seen: set[Node] = set()
    todo = [(root, False) for root in reversed(roots)]
    while todo:
        node, is_expanded = todo.pop()
        if is_expanded:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(child, False) for child, _ in node.next_functions if child is not None]
    return found
