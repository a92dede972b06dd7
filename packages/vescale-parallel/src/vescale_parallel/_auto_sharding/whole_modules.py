"""Norms over an axis that is sharded: around them it is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vescale_parallel._trace.axes import Graph, Step, Trace, Value, is_within

from .axis_search import Search


def called_whole(search: Search, atom: int, module: str) -> tuple[Search, int] | None:
    """Return a search in which a module hands on an axis that it needs all of.

    The module gets one tensor with the axis and returns one of the same shape, and multiplies no
    matrices, so that it costs little to have every rank compute all of it.

    Returns:
        The search, of a forward in which the module is one operator and its parameters are none
        to be sharded, and the dim that the axis is in. None for other modules.
    """
    trace = search.trace
    steps = [step for step in trace.steps if is_within(step.module, module)]
    ends = _ends(search, atom, steps)
    if module not in trace.called or ends is None or any(step.flops for step in steps):
        return None
    entering, leaving = ends
    dims = [d for d, dim in enumerate(entering.dims) if atom in search.axes.atoms(dim)]
    same = [d for d, dim in enumerate(leaving.dims) if atom in search.axes.atoms(dim)]
    if dims != same or len(dims) != 1 or entering.shape != leaving.shape:
        return None
    if search.parts(atom, entering.dims[dims[0]], entering) != 1:
        return None
    return Search(Graph(_as_one(trace, module, entering, leaving)), search.size), dims[0]


def are_in_one(names: Collection[str], blocks: Collection[str]) -> bool:
    """Whether all names are of one block: an axis of several is that of what runs through them."""
    return any(all(is_within(name, block) for name in names) for block in blocks)


def _ends(search: Search, atom: int, steps: list[Step]) -> tuple[Value, Value] | None:
    """Return the one tensor with an axis that steps read, and the one that they leave."""
    made = {value.index: value for step in steps for value in step.outputs}
    read = {value.index: value for step in steps for value in step.inputs}
    inside = {step.index for step in steps}
    carriers = search.graph.carriers[atom]
    entering = [
        value
        for index, value in read.items()
        if index in carriers and index not in made and value.parameter is None
    ]
    leaving = [
        value
        for index, value in made.items()
        if index in search.graph.returned
        or any(reader.index not in inside for reader in search.graph.readers[index])
    ]
    if len(entering) != 1 or len(leaving) != 1 or leaving[0].index not in carriers:
        return None
    return entering[0], leaving[0]


def _as_one(trace: Trace, module: str, entering: Value, leaving: Value) -> Trace:
    """Return a forward in which a module is one operator that hands on all axes."""
    last = max(step.index for step in trace.steps if is_within(step.module, module))
    steps: list[Step] = []
    for step in trace.steps:
        if not is_within(step.module, module):
            steps.append(step)
        elif step.index == last:
            steps.append(Step(last, module, "whole", (entering,), (leaving,), "no"))
        else:
            steps.append(Step(step.index, module, "none", (), (), "no"))
    return dataclasses.replace(
        trace,
        steps=steps,
        obstacles=[each for each in trace.obstacles if not is_within(each.module, module)],
        parameters={
            fqn: value
            for fqn, value in trace.parameters.items()
            if not is_within(fqn.rpartition(".")[0], module)
        },
    )
