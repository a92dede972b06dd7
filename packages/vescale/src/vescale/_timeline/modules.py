"""Spans of the modules of a model, forward and backward.

[Note: spans of backward]
The backward pass of a module begins when the gradient of one of its outputs is complete, and ends
when that of one of its inputs is: autograd runs hooks of graph nodes there. Inputs may have other
readers, or need no gradient; so whatever comes next in another module ends it as well, as does the
end of the pass. That nests the spans as the modules are nested, whatever the graph looks like.
Hooks on tensors would tell the same; they are seen by whoever wants to split a backward pass, and
hooks of whole backward passes change what modules return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from vescale._torch_private import is_in_backward

from .recorder import Recorder
from .span import Span

Granularity = Literal["blocks", "all"]
_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(eq=False, slots=True)
class _Pass:
    """A pass of a module that runs.

    Attributes:
        entries: Nodes of the graph that the module's inputs come from.
    """

    module: str
    kind: str
    begin: int
    entries: Sequence[Node] = ()


class ModulePasses:
    """The passes of modules that run on this rank, outermost first."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[_Pass] = []

    def enter_forward(self, module: str, inputs: Any) -> None:
        """A module begins forward, or is run again for its backward pass."""
        again = is_in_backward()
        if not again:
            self.end_backwards()
        kind = "recompute" if again else "forward"
        self._open.append(_Pass(module, kind, self._recorder.clock(), _nodes(inputs)))

    def leave_forward(self, module: str, output: Any) -> None:
        """A module ends forward; ``output`` is None if it raised."""
        done = next(
            (each for each in reversed(self._open) if each.module == module and _runs(each)), None
        )
        if done is None:
            return
        self._end_through(done)
        inputs = {*done.entries}
        exits = [node for node in _nodes(output) if node not in inputs]
        if not exits:
            return
        backward = _Pass(module, "backward", 0)
        # Neither hook refers to a node: a graph is freed as it would be without them.
        for node in dict.fromkeys(exits):
            node.register_prehook(lambda _: self._enter_backward(backward))
        for node in inputs:
            node.register_prehook(lambda _: self._leave_backward(backward))

    def end_backwards(self) -> None:
        """End the backward passes that run."""
        while self._open and not _runs(self._open[-1]):
            self._end(self._open.pop())

    def _enter_backward(self, entered: _Pass) -> None:
        if not self._recorder.is_open or entered in self._open:
            return
        inside = f"{entered.module}."
        while self._open and not _runs(self._open[-1]):
            if inside.startswith(f"{self._open[-1].module}.") and (
                self._open[-1].module != entered.module
            ):
                break
            self._end(self._open.pop())
        entered.begin = self._recorder.clock()
        self._open.append(entered)

    def _leave_backward(self, left: _Pass) -> None:
        if left in self._open:
            self._end_through(left)

    def _end_through(self, last: _Pass) -> None:
        while True:
            done = self._open.pop()
            self._end(done)
            if done is last:
                return

    def _end(self, done: _Pass) -> None:
        if self._recorder.is_open:
            span = Span(
                lane="modules",
                name=done.module,
                kind=done.kind,
                begin=done.begin,
                end=self._recorder.clock(),
            )
            self._recorder.spans.append(span)


def _runs(each: _Pass) -> bool:
    return each.kind != "backward"


def _nodes(tree: Any) -> list[Node]:
    """Return the nodes of autograd that the tensors of a tree come from.

    Modules take and return few kinds of trees; a general walk takes longer than all the rest.
    """
    if isinstance(tree, Tensor):
        return [] if tree.grad_fn is None else [tree.grad_fn]
    if isinstance(tree, Mapping):
        tree = cast("Mapping[Any, Any]", tree).values()
    elif not isinstance(tree, tuple | list):
        return []
    return [node for each in cast("Iterable[Any]", tree) for node in _nodes(each)]


@contextmanager
def watched_modules(
    model: nn.Module, recorder: Recorder, granularity: Granularity
) -> Iterator[None]:
    """Record passes of modules inside the block; their hooks are gone behind it."""
    passes = ModulePasses(recorder)
    recorder.ended = passes.end_backwards
    with ExitStack() as stack:
        for name, module in _chosen(model, granularity):

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                passes.enter_forward(name, (args, kwargs))

            def leave(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
                passes.leave_forward(name, output)

            before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(before.remove)
            # Also when forward raises, as a stage of a pipeline does at its end.
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _chosen(model: nn.Module, granularity: Granularity) -> list[tuple[str, nn.Module]]:
    """Return the modules to watch: no compiled ones, whose hooks would be compiled with them."""
    named = {name: module for name, module in model.named_modules() if name}
    compiled = [name for name, module in named.items() if _is_compiled(module)]
    plain = {
        name: module
        for name, module in named.items()
        if not any(f"{name}.".startswith(f"{each}.") for each in compiled)
    }
    if granularity == "all":
        return [*plain.items()]
    units = {*_units(model, "")}
    return [(name, module) for name, module in plain.items() if name in units]


def _units(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of what outermost lists hold, and of the largest modules beside them.

    Classes do not tell blocks apart: those of a stage have one each.
    """
    for name, child in module.named_children():
        if isinstance(module, _LISTS) or not any(isinstance(m, _LISTS) for m in child.modules()):
            yield prefix + name
        else:
            yield from _units(child, f"{prefix}{name}.")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None
