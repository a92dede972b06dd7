"""Where backward passes enter the graph of one call: at its results, and at gradients of inputs.

[Note: gradients with a graph] The gradient of an input that ``create_graph=True`` computed
belongs to the graph of the call, as its results do: a loss may be made of it alone, as the
residual of a differential equation or a penalty on gradients is. A backward pass from there need
not come to any result. So it is watched as results are; also gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import pytree

from .asked_gradients import CallGraph
from .intermediate_results import HandedGradient, IntermediateResult, Sources, in_graph_order


@dataclass(eq=False)
class EndsOfCall:
    """The tensors at which backward passes enter the graph of one call.

    Attributes:
        begin: Has a backward pass through a tensor begin with parameters at their place.
        plain_gradient_of: Has the gradient of a result be a plain tensor.
        make_graph: Makes what stands for public parameters in the graph.
        is_running: Whether the call still runs: what its forward differentiates is a part of it.
    """

    begin: Callable[[Tensor], None]
    plain_gradient_of: Callable[[Tensor], None]
    make_graph: Callable[[], CallGraph | None]
    is_running: Callable[[], bool]
    _graphs: list[CallGraph | None] = field(default_factory=list["CallGraph | None"])
    _others: list[Tensor] = field(default_factory=list[Tensor])

    def with_inputs(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return what runs forward on such arguments, watched for gradients with a graph.

        Forward itself if none of them needs a gradient.
        """
        if not torch.is_grad_enabled():
            return forward
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._others = [tensor for tensor in given if not tensor.requires_grad]
        if len(self._others) == len(given):
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._inputs(args, kwargs)
            return forward(*args, **kwargs)

        return run

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = tuple(args), dict(kwargs)
        watched: dict[int, Tensor] = {}

        def watch(leaf: Tensor) -> Tensor:
            if not _is_wanted(leaf):
                return leaf
            if id(leaf) not in watched:
                # Not the program's own tensor, which may be given to many calls.
                watched[id(leaf)] = leaf.view_as(leaf)
                watched[id(leaf)].register_hook(self._gradient)
            return watched[id(leaf)]

        return pytree.tree_map_only(Tensor, watch, given)

    def results(self, output: Any) -> Any:
        """Return what a call returned, watched."""
        if not torch.is_grad_enabled():
            return output
        for tensor in filter(_is_wanted, self._others):
            if tensor.is_leaf:  # of which forward has asked for the gradient
                tensor.register_hook(self._gradient)
        results = {
            id(leaf): leaf
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        }
        watched = dict[int, Tensor]()
        computed = list[Tensor]()
        for key, result in results.items():
            if not result.is_leaf:
                computed.append(result)
            elif isinstance(result, nn.Parameter):
                watched[key] = self._watched(result).public
            else:  # made by forward: what is computed from it has it in its graph
                result.register_hook(self._gradient)
        made = dict[int, IntermediateResult]()
        for result, sources in in_graph_order(computed):
            made[id(result)] = self._watched(result, [made[id(each)] for each in sources])
        watched |= {key: each.public for key, each in made.items()}
        return pytree.tree_map_only(Tensor, lambda leaf: watched.get(id(leaf), leaf), output)

    def _watched(
        self, result: Tensor, sources: Sequence[IntermediateResult] = ()
    ) -> IntermediateResult:
        # Hooks run in the order they came in. What the last block returned, and forward as it was,
        # has the block's; backward of the call begins before that of a block.
        first = result.view_as(result) if result._backward_hooks else result
        self.begin(first)
        self.plain_gradient_of(first)
        handed = HandedGradient()
        public = self._led_to_by(first, handed, Sources(sources, self._with_graph))
        return IntermediateResult(result, public, handed)

    def _gradient(self, grad: Tensor) -> Tensor | None:
        """Watch the gradient of an input that has a graph; see [Note: gradients with a graph]."""
        if not grad.requires_grad or self.is_running():
            return None
        return self._with_graph(grad)

    def _with_graph(self, grad: Tensor) -> Tensor:
        first = grad.view_as(grad)
        self.begin(first)
        return self._led_to_by(first, HandedGradient(), Sources())

    def _led_to_by(self, result: Tensor, handed: HandedGradient, sources: Sources) -> Tensor:
        if not self._graphs:  # one for all, so that one pass finds what is asked for
            self._graphs.append(self.make_graph())
        graph = self._graphs[0]
        return result if graph is None else graph.led_to_by(result, handed, sources)


def _is_wanted(leaf: object) -> bool:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter | DTensor):
        return False
    return leaf.requires_grad and leaf.layout == torch.strided
