"""What sharding one axis does to the rest of the forward: its values, then their gradients.

See [Note: whole, cut, partial value].
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from .flow import Flow, Graph, RefusedError, is_partial, where
from .gradients import follow_gradients
from .graph import Step, Value


def follow(graph: Graph, atoms: Collection[int]) -> Flow:
    """Follow axes that are cut together through the forward and back.

    Raises:
        RefusedError: If they cannot be cut.
    """
    flow = Flow(cut=set[int]().union(*(graph.carriers[atom] for atom in atoms)))
    _forward(graph, atoms, flow)
    _check_biases(graph, flow)
    follow_gradients(graph, flow)
    return flow


def check_partial(graph: Graph, steps: Iterable[Step]) -> None:
    """Check that modules return the partial values that steps in them make, or a linear function.

    Raises:
        RefusedError: If a module does something else with them.
    """
    made = {value.index: step.module for step in steps for value in step.outputs}
    flow = Flow(cut=set(), partial=made)
    waiting = sorted({step.index for index in made for step in graph.readers[index]})
    seen = set(waiting)
    while waiting:
        step = graph.trace.steps[heapq.heappop(waiting)]
        summed = [v for v in step.inputs if is_partial(flow, v, step)]
        if summed and not graph.is_dead(step):
            _spread(graph, flow, step, _pass_on(graph, flow, step, summed), waiting, seen)


def _forward(graph: Graph, atoms: Collection[int], flow: Flow) -> None:
    contracts = set[int]().union(*(graph.contracts[atom] for atom in atoms))
    waiting = sorted(graph.steps(flow.cut))
    seen = set(waiting)
    while waiting:
        step = graph.trace.steps[heapq.heappop(waiting)]
        summed = [v for v in step.inputs if is_partial(flow, v, step)]
        if graph.is_dead(step):
            continue
        if graph.trace.axes.atoms(step.looked_up).intersection(atoms):
            raise RefusedError(f"is looked up by an index {where(step)}")
        if step.index in contracts:
            made_at = _contract(graph, flow, step, summed)
            _check_contracted(graph, atoms, step)
        elif summed:
            made_at = _pass_on(graph, flow, step, summed)
        else:
            continue
        _spread(graph, flow, step, made_at, waiting, seen)


def _spread(
    graph: Graph, flow: Flow, step: Step, made_at: str, waiting: list[int], seen: set[int]
) -> None:
    """Note that a step's outputs are partial values, and queue their readers.

    A step is queued once and taken in the order of the trace, so all of its inputs are known then.
    """
    if step.into_view:  # the rest of that tensor is whole, and one tensor cannot be both
        raise RefusedError(
            f"its partial sums are written into a part of a tensor {where(step)}, while the rest "
            "of that tensor is whole"
        )
    for value in step.outputs:
        flow.partial[value.index] = made_at
        for reader in graph.readers[value.index]:
            if reader.index not in seen:
                seen.add(reader.index)
                heapq.heappush(waiting, reader.index)


def _contract(graph: Graph, flow: Flow, step: Step, summed: list[Value]) -> str:
    """Return where the sum of a contraction with a parameter is taken."""
    having = [v for v in step.inputs if v.index in flow.cut]
    if summed or len(having) < 2 or not any(_is_weight(graph, value) for value in having):
        raise RefusedError(
            f"{step.operator} {where(step)} reduces over this dimension of an activation, so "
            "every rank needs all of it",
            needed_in=step.module,
        )
    if not any(v.from_batch for v in having):
        raise RefusedError(
            f"{step.operator} {where(step)} reduces over this dimension of two parameters, with "
            "no activation that could be summed over ranks"
        )
    _add_biases(graph, flow, step, [v for v in step.inputs if v.index not in flow.cut])
    return step.module


def _check_contracted(graph: Graph, atoms: Collection[int], step: Step) -> None:
    """Refuse a sum over a dimension of which ranks have some parts whole."""
    axes = graph.trace.axes
    for dim in step.contracted:
        if axes.atoms(dim).intersection(atoms) and not axes.covers(atoms, dim):
            raise RefusedError(
                f"{step.operator} {where(step)} also reduces over what is behind this dimension, "
                "which every rank has whole, so the sum over ranks would count it once a rank"
            )


def _is_weight(graph: Graph, value: Value) -> bool:
    """Whether a value is computed of parameters alone, or is chosen among those by the batch."""
    while value.from_batch:
        made_by = graph.producer.get(value.index)
        if made_by is None or made_by.linear != "first":
            return False
        value = made_by.inputs[0]
    return value.from_parameter


def _add_biases(graph: Graph, flow: Flow, step: Step, values: Iterable[Value]) -> None:
    """Note the parameters that are added to partial values; nothing else that is whole may be."""
    for value in values:
        if not value.is_float or value.is_zero:
            continue
        chain = [value]
        while chain[-1].parameter is None:
            made_by = graph.producer.get(chain[-1].index)
            if made_by is None or made_by.linear != "first":
                raise RefusedError(
                    f"{step.operator} {where(step)} adds a tensor that every rank has to its "
                    "partial sums, so the sum over ranks would count it once a rank"
                )
            chain.append(made_by.inputs[0])
        flow.added.update(each.index for each in chain)
        flow.biases.add(chain[-1].parameter)


def _check_biases(graph: Graph, flow: Flow) -> None:
    """Refuse parameters that are added to partial values and used in another way too."""
    for index in flow.added:
        for step in graph.readers[index]:
            for value in step.outputs:
                if value.index not in flow.added and not is_partial(flow, value, step):
                    raise RefusedError(
                        f"the bias that is added to its partial sums is used by {step.operator} "
                        f"{where(step)}, too"
                    )


def _pass_on(graph: Graph, flow: Flow, step: Step, summed: list[Value]) -> str:
    if any(value.index in flow.cut for value in step.inputs + step.outputs):
        raise RefusedError(
            f"{step.operator} {where(step)} combines its shards with its partial sums"
        )
    others = [v for v in step.inputs if v not in summed]
    match step.linear:
        case "first":
            linear = summed == [step.inputs[0]]
        case "last":
            linear = summed == [step.inputs[-1]]
        case "each":
            linear = len(summed) == 1 and (len(step.inputs) == 2 or step.operator == "mul")
        case "jointly":
            linear = True
            _add_biases(graph, flow, step, others)
        case _:
            linear = False
    if not linear:
        raise RefusedError(
            f"{step.operator} {where(step)} is not linear and comes before that module returns, "
            "where its partial sums would be summed over ranks"
        )
    return flow.partial[summed[0].index]
