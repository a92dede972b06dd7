"""Of which whole values the gradients are partial values, and where those are summed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .flow import Flow, Graph, RefusedError, is_partial, is_within, where
from .graph import Step, Value

# Tensors behind one after which it is the model's main stream, which is whole.
_FAR = 2000


class _Again(Exception):
    """Gradients must not be summed at the beginning of these modules, but further out."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules


def follow_gradients(graph: Graph, flow: Flow) -> None:
    """Note which gradients are partial values, and where they are summed.

    Raises:
        RefusedError: If one of them cannot be.
    """
    # That a module must not sum its inputs' gradients can show at a value made before it, when
    # what follows from the sum was decided already: start over, without that sum.
    unsummed: set[str] = set()
    while True:
        flow.summed.clear()
        flow.replicated.clear()
        flow.reentered.clear()
        try:
            _gradients(graph, flow, unsummed)
        except _Again as again:
            unsummed |= again.modules
        else:
            return


def _gradients(graph: Graph, flow: Flow, unsummed: set[str]) -> None:
    """Find the whole values whose gradients are partial values, from the last to the first."""
    touched = {*flow.cut, *flow.partial}
    waiting: list[int] = []
    seen: set[int] = set()

    def ask(values: Iterable[Value]) -> None:
        for value in values:
            if value.has_grad and value.index not in seen and value.index not in flow.cut:
                seen.add(value.index)
                heapq.heappush(waiting, -value.index)

    for index in graph.steps(touched):
        step = graph.trace.steps[index]
        if any(_is_cut_or_partial(flow, value, step) for value in step.outputs):
            ask(step.inputs)
    partial: set[int] = set()
    while waiting:
        value = graph.trace.values[-heapq.heappop(waiting)]
        if _collect(graph, flow, value, partial, unsummed):
            partial.add(value.index)
            if value.parameter is not None:
                flow.replicated.add(value.parameter)
            elif value.index in graph.producer:
                ask(graph.producer[value.index].inputs)


def _is_cut_or_partial(flow: Flow, value: Value, step: Step) -> bool:
    return value.index in flow.cut or is_partial(flow, value, step)


def _collect(
    graph: Graph, flow: Flow, value: Value, partial: set[int], unsummed: set[str]
) -> bool:
    """Return whether a value's gradient is a partial value where the value is made."""
    raw, whole = list[Step](), list[Value]()
    summed: set[str] = set()
    for step in graph.readers[value.index]:
        if is_partial(flow, value, step):
            continue
        is_part, others = _contributions(flow, step, value, partial)
        whole += others
        if is_part:
            boundary = _boundary(graph, value, step, unsummed)
            if boundary is None:
                raw.append(step)
            else:
                summed.add(boundary)
                others = [out for out in others if is_within(step.module, boundary)]
    nested = {b for b in summed if any(b != o and is_within(b, o) for o in summed)}
    if nested or (raw and summed):
        raise _Again(nested or summed)
    if raw:
        further = {b for out in whole for b in _summed_behind(graph, flow, out)}
        if further:
            raise _Again(further)
        if value.index in flow.partial:
            flow.reentered.add(flow.partial[value.index])
            raw = []
    flow.summed[value.index] = summed
    return bool(raw)


def _contributions(
    flow: Flow, step: Step, value: Value, partial: set[int]
) -> tuple[bool, list[Value]]:
    """Return whether a step makes a gradient partial, and its outputs that add a whole one."""
    sums, whole = False, list[Value]()
    for out in step.outputs:
        if not out.has_grad:
            continue
        is_summed = is_partial(flow, out, step) and value.index not in flow.added
        if is_summed or out.index in flow.cut or out.index in partial:
            sums = True
        else:
            whole.append(out)
    return sums, whole


def _summed_behind(graph: Graph, flow: Flow, start: Value) -> set[str]:
    """Return the modules that made a gradient whole, by summing it where they begin.

    Raises:
        RefusedError: If a part of the gradient is whole because it never was a partial value.
    """
    found: set[str] = set()
    waiting, seen = [start], {start.index}
    while waiting:
        value = waiting.pop()
        if value.index in graph.returned or value.index in flow.partial or len(seen) > _FAR:
            made_by = graph.producer[start.index]
            raise RefusedError(
                f"a tensor is used by its shards and by {made_by.operator} {where(made_by)}, "
                "which every rank computes whole, so its gradient is only partly one to sum"
            )
        summed = flow.summed.get(value.index, set())
        found |= summed
        for step in graph.readers[value.index]:
            if not any(is_within(step.module, module) for module in summed):
                fresh = [o for o in step.outputs if o.has_grad and o.index not in seen]
                seen.update(out.index for out in fresh)
                waiting += fresh
    return found


def _boundary(graph: Graph, value: Value, step: Step, unsummed: set[str]) -> str | None:
    """Return the innermost module around a step that was called with the value."""
    if value.parameter is not None or not value.from_batch:
        return None
    made_at = graph.producer[value.index].module if value.index in graph.producer else None
    module = step.module
    while True:
        if made_at is not None and is_within(made_at, module):
            return None
        if module in graph.trace.called and module not in unsummed:
            return module
        if not module:
            return None
        module = module.rpartition(".")[0]
