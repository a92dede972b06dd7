"""Blocks of a model that torch.compile compiles, one by one.

[Note: what is compiled] The forward of a block, as its author wrote it. Around it, eager, stays
what has effects that a compiler does not see: the hooks that gather, free and reduce parameters,
the borders of a pipeline's stages, the run again in backward. So a compiled program has a block's
plain parameters and its arguments as inputs, and knows of no plan.

A block runs as it is written where operators have to be seen one by one: in calls in which rows
depend on each other in it, or its own forward draws random numbers, or attends to a sequence that
ranks share. A module within it that draws, attends so, or sends tokens to experts of other ranks
runs so alone, and the graph breaks there.

Every block has code of its own to compile, since the guards of a compiled program name one block,
and torch gives code up that was compiled more often than ``torch._dynamo.config.recompile_limit``.
Of code behind a break see :mod:`.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vescale_parallel._cross_replica.context.attention.intercept import (
    AttentionMode,
    refuse_compiled_attention,
)
from vescale_parallel._model.code import with_own_code
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._rng.sharded_rng import draws_in_part
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._torch_private import (
    compiled_graph,
    current_dispatch_mode,
    function_modes,
    is_dynamo_error,
    restarts_compilation,
)

from .checkpoints import RepeatedCalls
from .frames import CompiledFrames
from .function_modes import has_to_see, passed_by

# Whose lines are not those of the user's model.
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))

# Of a block that was called and has no graphs.
_NO_GRAPH = (
    "torch.compile made no graph of it: nothing in it computes; or compiling is switched off, or "
    "was for code that it calls, as at a limit of torch (torch._dynamo.reset() begins anew)"
)

_CoupledIn = Callable[[str], bool]


@dataclass(frozen=True)
class CompiledBlock:
    """What became of a block that was to be compiled.

    Attributes:
        num_graphs: Graphs that were compiled so far: for training and evaluation, for other
            shapes, and behind breaks.
        breaks: Where a graph ends before the block does: ``"file:line: why"``.
        eager: Why the block, or what it calls, runs as it is written, always or in some calls;
            ``""`` if it does not.
    """

    num_graphs: int
    breaks: tuple[str, ...]
    eager: str


class _Compiler:
    """Compiles the graphs of one block; itself a backend of torch.compile.

    torch keeps it for as long as it keeps a program that it made. It holds nothing of the model,
    which would be held for as long, too: what is behind a break is code of the process.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.breaks: dict[str, None] = {}
        self.num_graphs, self.has_run, self.failure = 0, False, ""

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph, or hand it back as it is."""
        self.num_graphs += 1
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks[_said(reason)] = None
        attends = _attends(graph)
        run = cast("Callable[..., Any]", graph.forward)
        try:
            run = compiled_graph(graph, inputs, self._backend)
        except Exception as error:  # whatever a compiler raises: the graph is right without it
            if restarts_compilation(error):
                self.num_graphs -= 1
                raise
            self.failure = _first_line(error)

        def run_graph(*inputs: Any) -> Any:
            if attends:
                refuse_compiled_attention()
            self.has_run = True
            return run(*inputs)

        return run_graph


class _CompiledForward:
    """Runs the forward of one block, compiled when it is first called."""

    def __init__(
        self,
        fqn: str,
        forward: Callable[..., Any],
        backend: str,
        is_coupled: _CoupledIn,
        boundary: Boundary | None,
        num_modules: int,
    ) -> None:
        self._fqn, self._forward = fqn, forward
        self._is_coupled, self._boundary = is_coupled, boundary
        self._compiler = _Compiler(backend)
        run = _calling(forward) if boundary is None else _crossing(forward, boundary)
        self._frames = CompiledFrames(run, num_modules)
        self._compiled = torch.compile(_seen_by(self._frames), backend=self._compiler)
        self._repeated = RepeatedCalls()
        self._eager = ""

    def report(self) -> CompiledBlock:
        found = self._compiler
        return CompiledBlock(found.num_graphs, tuple(found.breaks), found.failure or self._eager)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = self._compiler
        if self._repeated.runs_as_written(self._is_as_written):
            return self._forward(*args, **kwargs)
        compiler.has_run, has_failed = False, bool(compiler.failure)
        try:
            with passed_by():
                output = self._compiled(*args, **kwargs)
        except Exception as error:
            # Of what has run in part, effects would come twice.
            if compiler.has_run or not is_dynamo_error(error):
                raise
            output = self._forward(*args, **kwargs)  # which raises what is the block's own fault
            compiler.failure = _first_line(error)
            self._repeated.note_as_written()
        if has_failed:
            return output
        if compiler.failure:
            warn_at_user_line(
                f"compile 'blocks': {self._fqn!r} is not compiled and runs as it is written, for "
                f"this rank: {compiler.failure}"
            )
        elif self._frames.given_up or not compiler.num_graphs:
            self._run_eager_as("; ".join(self._frames.given_up) or _NO_GRAPH)
        return output

    def _is_as_written(self) -> bool:
        return bool(self._compiler.failure) or self._is_seen()

    def _is_seen(self) -> bool:
        """Whether somebody has to see the operators of this call, or functions, one by one."""
        if self._boundary is not None and self._boundary.listener is not None:
            return True
        mode = current_dispatch_mode()
        if why := draws_in_part(mode):
            self._run_eager_as(why)
        elif mode is None and self._is_coupled(self._fqn):
            self._run_eager_as("rows of the batch depend on each other in it")
        elif mode is None and any(isinstance(each, AttentionMode) for each in function_modes()):
            self._run_eager_as("its own forward attends to what other ranks have of the sequence")
        elif mode is None:
            return any(map(has_to_see, function_modes()))
        return True

    def _run_eager_as(self, why: str) -> None:
        if not self._eager:
            self._eager = why
            warn_at_user_line(
                f"compile 'blocks': {self._fqn!r} runs as it is written in calls such as this "
                f"one, since {why}"
            )


def compile_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    backend: str,
    is_coupled: _CoupledIn,
    boundary: Boundary | None,
) -> None:
    """Have the blocks of a model be compiled when they are first called, in place.

    Args:
        model: The model.
        blocks: FQNs of those of this rank.
        backend: What compiles, by the name that torch.compile knows.
        is_coupled: Whether rows of the call that runs depend on each other in a block.
        boundary: That activations cross within blocks, of tensor-parallel ranks if there are some.
    """
    found: dict[str, _CompiledForward] = {}
    for fqn in blocks:
        block = model.get_submodule(fqn)
        size = sum(1 for _ in block.modules())
        found[fqn] = _CompiledForward(fqn, block.forward, backend, is_coupled, boundary, size)
        block.forward = found[fqn]
        object.__setattr__(block, "_vescale_is_compiled", True)
    object.__setattr__(model, "_vescale_compiled", found)


def compile_report(model: nn.Module) -> dict[str, CompiledBlock]:
    """Return what became of the blocks that a plan with ``compile`` has compiled, by FQN.

    As of now: a block is compiled when it is first called, again for calls of another kind. Blocks
    that other ranks of a pipeline run have no graphs here.

    Raises:
        ValueError: If the model's plan compiles nothing.
    """
    found: Mapping[str, _CompiledForward] | None = getattr(model, "_vescale_compiled", None)
    if found is None:
        raise ValueError(
            f"expected a model that was parallelized by a plan with compile 'blocks', got a "
            f"{type(model).__name__} of which nothing is compiled"
        )
    return {fqn: forward.report() for fqn, forward in found.items()}


def _seen_by(frames: CompiledFrames) -> Callable[..., Any]:
    def begin(*args: Any, **kwargs: Any) -> Any:
        return frames.run(*args, **kwargs)

    return begin


def _calling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return with_own_code(run)


def _crossing(forward: Callable[..., Any], boundary: Boundary) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # A program knows the boundary from here first: integers of what it knows from a module,
        # or its hooks, are constants to torch, and each length of sequences had its own program.
        boundary.forget()
        return forward(*args, **kwargs)

    return with_own_code(run)


def _attends(graph: nn.Module) -> bool:
    """Whether a graph calls attention."""
    return any(
        node.target is F.scaled_dot_product_attention
        for part in graph.modules()
        for node in getattr(getattr(part, "graph", None), "nodes", ())
    )


def _said(reason: Any) -> str:
    """Return the user's line at which a graph breaks, and why."""
    lines = [line for line in reason.user_stack if not line.filename.startswith(_LIBRARIES)]
    where = f"{lines[-1].filename}:{lines[-1].lineno}: " if lines else ""
    what, _, explained = reason.reason.partition("Explanation: ")
    return where + _first_line(explained or what)


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
