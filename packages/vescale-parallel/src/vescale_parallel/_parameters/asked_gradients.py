"""Gradients that a program asks for: ``backward(inputs=...)`` and ``torch.autograd.grad``.

[Note: public parameters in a graph]
What computes are plain parameters; the public ones, which a program has, would be in no graph: a
backward pass that is to end at some of them would find nothing, and train nothing. So the graph of
each call has a node for all of them, which every result of the call leads to. A pass of
``loss.backward()`` brings it nothing; such a pass goes on through what the call computed, and its
gradients are reduced as it ends. One that asks for public parameters comes to the node, and the
node runs a pass of its own: from where this one has arrived, to the plain parameters, with all
that such a pass does. It returns what was reduced, as gradients of the public ones.

Which of the two it is, a node tells that nobody can ask for: only a pass through the whole graph
comes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import announced_failures
from vescale_parallel._torch_private import comes_to, keeps_graph, parameters_of_ddp

from .intermediate_results import HandedGradient, Sources
from .sharded_parameter import ShardedParameter

_OWN_PASS = (
    "gradients that a program asks for, by backward(inputs=...) or torch.autograd.grad, are "
    "reduced at once"
)


class AskedGradients:
    """Makes gradients of public parameters, for whoever asks; see [Note: public parameters ...].

    Args:
        params: Every parameter of the model.
        reduces_at_once: Whether no gradients wait on each rank, nor those of a pass now would.

    Attributes:
        is_running: Whether a pass for them runs now, whose hooks are called by torch.
    """

    def __init__(
        self, params: Sequence[ShardedParameter], reduces_at_once: Callable[[], bool]
    ) -> None:
        self._params, self._reduces_at_once = params, reduces_at_once
        self.is_running = False

    def of_call(self) -> CallGraph | None:
        """Return the node of a call's graph; None if there is no graph."""
        if not any(param.sharded.requires_grad for param in self._params):
            return None
        # Whose reducer takes every public parameter that a pass comes to, also with nothing. Plain
        # ones are in their places while the model is called.
        reduced = {id(each) for each in parameters_of_ddp()}
        if any({id(p.sharded), id(p.unsharded)} & reduced for p in self._params):
            return None
        return CallGraph(self._params, self._made_by)

    def _made_by(self, run: Callable[[], None]) -> tuple[Tensor | None, ...]:
        """Return the gradients that a backward pass gives the public parameters."""
        if not self._reduces_at_once():
            raise ValueError(f"{_OWN_PASS}: ask for them outside of no_sync(), and after its step")
        if torch.is_grad_enabled():
            raise ValueError(
                "torch.autograd.grad(..., create_graph=True) of the parameters of a parallelized "
                "model asks for a graph through sums over ranks, which there is none of. "
                "Gradients of inputs and results can be differentiated"
            )
        with self._set_aside():
            run()
            return tuple(param.sharded.grad for param in self._params)

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        publics = [param.sharded for param in self._params]
        before = [public.grad for public in publics]
        self.is_running = True
        try:
            for public in publics:
                public.grad = None
            with announced_failures():
                yield
        finally:
            self.is_running = False
            for public, grad in zip(publics, before, strict=True):
                public.grad = grad


@dataclass
class _Passes:
    """What a backward pass that asks for public parameters has come to.

    Attributes:
        results: Of the call; with each its gradient, and whether the pass goes on behind it.
        deferred: Hand out gradients that were computed in the call.
    """

    results: list[tuple[Tensor, Tensor, bool]] = field(
        default_factory=list["tuple[Tensor, Tensor, bool]"]
    )
    deferred: list[Callable[[], None]] = field(default_factory=list["Callable[[], None]"])

    def run(self, ends: Sequence[Tensor]) -> None:
        """Go on to the parameters at which it ends."""
        results, self.results = self.results, []
        deferred, self.deferred = self.deferred, []
        if results:
            outputs, grads, goes_on = zip(*results, strict=True)
            ends = [each for each in ends if each.requires_grad]
            keeps = keeps_graph() or any(goes_on)
            torch.autograd.backward(outputs, grads, retain_graph=keeps, inputs=ends)
        for hand_out in deferred:
            hand_out()


class CallGraph:
    """What stands for the public parameters in the graph of one call's results.

    Args:
        params: Every parameter.
        made_by: Returns the gradients that a backward pass gives them.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        made_by: Callable[[Callable[[], None]], tuple[Tensor | None, ...]],
    ) -> None:
        publics = [param.sharded for param in params]
        # A part of the model may compute with public ones.
        ends = [p.unsharded for p in params if p.unsharded is not None] + publics
        self._passes = _Passes()
        self.node: Any = _Publics.apply(self._passes, ends, made_by, *publics)
        anchor = torch.zeros((), requires_grad=True)
        self.whole: Any = anchor.view_as(anchor)

    def led_to_by(self, result: Tensor, handed: HandedGradient, sources: Sources) -> Tensor:
        """Return a result of the call from which public parameters can be asked for.

        Args:
            result: It, in the graph of the call.
            handed: What results that are computed from it give it in a backward pass.
            sources: Results that it is computed from.
        """
        nodes = self.node.grad_fn, self.whole.grad_fn
        of_call = self.node, self.whole, nodes, self._passes
        given = [each.public for each in sources.results]
        return _Result.apply(result, *of_call, handed, sources, *given)  # pyright: ignore[reportReturnType]

    def handing_out(self, hand_out: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return what backward of a result is to call, that hands out gradients of the call."""
        passes, whole = self._passes, self.whole.grad_fn

        def run(grad: Any) -> None:
            if comes_to(whole):
                hand_out(grad)
            else:
                passes.deferred.append(lambda: hand_out(grad))

        return run


class _Publics(torch.autograd.Function):
    """Gradients of the public parameters, from none of a call's graph."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, passes: _Passes, ends: Sequence[Tensor], made_by: Any, *publics: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes, ctx.ends, ctx.made_by, ctx.num_publics = passes, ends, made_by, len(publics)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None, None, None, *[None] * ctx.num_publics)
        return (None, None, None, *ctx.made_by(lambda: ctx.passes.run(ctx.ends)))


class _Result(torch.autograd.Function):
    """A result of a call, in the memory of what was computed, that leads to public parameters."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        result: Tensor,
        node: Tensor,
        whole: Tensor,
        nodes: Any,
        passes: _Passes,
        handed: HandedGradient,
        sources: Sources,
        *given: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.result, ctx.nodes, ctx.passes = result, nodes, passes
        ctx.handed, ctx.sources = handed, sources
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        publics, whole = ctx.nodes
        grad, all_run = ctx.handed.taken_from(grad), comes_to(whole)
        if grad is None:
            return (None,) * (7 + len(ctx.sources.results))
        to_sources = ctx.sources.gradients(ctx.result, grad, all_run=all_run)
        if all_run or not comes_to(publics):
            return (grad, *[None] * 6, *to_sources)
        behind = ctx.result.grad_fn
        goes_on = behind is not None and comes_to(behind)
        ctx.passes.results.append((ctx.result, grad.detach(), goes_on))
        return (grad, torch.zeros(()), *[None] * 5, *to_sources)
