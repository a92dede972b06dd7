"""Norms over an axis that is sharded: around them it is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vescale_parallel._trace.axes import Graph, Step, Trace, Value, is_within

from .axis_search import Atoms, Search
from .candidate import Whole


def called_whole(search: Search, atoms: Atoms, module: str) -> tuple[Search, Whole] | None:
    """Return a search in which a module hands on an axis that it needs all of.

    The module gets tensors with the axis, of one shape, returns one of the same shape, and
    multiplies no matrices, so that it costs little to have every rank compute all of it.

    Returns:
        The search, of a forward in which the module is one operator and its parameters are none
        to be sharded, and where the axis is. None for other modules.
    """
    trace = search.trace
    steps = [step for step in trace.steps if is_within(step.module, module)]
    ends = _ends(search, atoms, module, steps)
    if ends is None or any(step.flops for step in steps):
        return None
    entering, leaving = ends
    dims = [d for d, dim in enumerate(leaving.dims) if atoms & search.axes.atoms(dim)]
    if len(dims) != 1:
        return None
    for value in entering:
        same = [d for d, dim in enumerate(value.dims) if atoms & search.axes.atoms(dim)]
        if dims != same or value.shape != leaving.shape:
            return None
        if search.parts(atoms, value.dims[dims[0]], value) != 1:
            return None
    as_one = Graph(_as_one(trace, module, entering, leaving))
    having = {value.index for value in entering}
    _, *others = [at for at, index in trace.called[module] if index in having]
    return Search(as_one, search.size), Whole(dims[0], tuple(others))


def are_in_one(names: Collection[str], blocks: Collection[str]) -> bool:
    """Whether all names are of one block: an axis of several is that of what runs through them."""
    return any(all(is_within(name, block) for name in names) for block in blocks)


def _ends(
    search: Search, atoms: Atoms, module: str, steps: list[Step]
) -> tuple[list[Value], Value] | None:
    """Return the tensors with an axis that steps read, and the one that they leave."""
    made = {value.index: value for step in steps for value in step.outputs}
    read = {value.index: value for step in steps for value in step.inputs}
    inside = {step.index for step in steps}
    carriers = {index for atom in atoms for index in search.graph.carriers[atom]}
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
    if not entering or len(leaving) != 1 or leaving[0].index not in carriers:
        return None
    having, given = {value.index for value in entering}, search.trace.called.get(module, [])
    if {index for _, index in given[:1]} - having or having - {index for _, index in given}:
        return None  # the first activation is another one, or some are no arguments
    return entering, leaving[0]


def _as_one(trace: Trace, module: str, entering: list[Value], leaving: Value) -> Trace:
    """Return a forward in which a module is one operator that hands on all axes."""
    last = max(step.index for step in trace.steps if is_within(step.module, module))
    steps: list[Step] = []
    for step in trace.steps:
        if not is_within(step.module, module):
            steps.append(step)
        elif step.index == last:
            steps.append(Step(last, module, "whole", tuple(entering), (leaving,), "no"))
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
