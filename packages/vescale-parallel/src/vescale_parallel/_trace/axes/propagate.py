"""What sharding one axis does to the rest of the forward, and of the backward.

[Note: whole, cut, partial value]
With an axis cut, a tensor of the forward is *whole* on every rank, *cut* if one of its
dimensions has the axis, or *partial*, to be summed over the ranks: what an operator returns that
contracts the axis. A partial value becomes whole where the module that made it returns; until then
only operators that are linear may touch it. The gradient of a whole tensor is whole, or
partial if it was used with what is cut; it becomes whole where the module that was called with the
tensor begins. A sharding whose collectives cannot be placed so is refused, with the
operator that forbids it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .graph import Step, Trace, Value

# Tensors behind one after which it is the model's main stream, which is whole.
_FAR = 2000


class RefusedError(Exception):
    """An axis cannot be cut; the message says why.

    Plans print it behind the name of a parameter and its dimension: it says what there is about
    "this dimension", to someone who knows the model and not this package.
    """


@dataclass(eq=False)
class Graph:
    """A trace, and who made and read each value."""

    trace: Trace
    producer: dict[int, Step] = field(default_factory=dict[int, Step])
    readers: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))
    carriers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    contracts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    returned: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.returned |= {value.index for value in self.trace.returned}
        axes = self.trace.axes
        for value in self.trace.values:
            for atom in axes.atoms(axis for dim in value.dims for axis in dim):
                self.carriers[atom].add(value.index)
        for step in self.trace.steps:
            for value in step.inputs:
                self.readers[value.index].append(step)
            for value in step.outputs:
                self.producer[value.index] = step
            for atom in axes.atoms(axis for dim in step.contracted for axis in dim):
                self.contracts[atom].add(step.index)

    def is_dead(self, step: Step) -> bool:
        """Whether nobody looks at what a step made, such as attention's unused mean weights."""
        outputs = {value.index for value in step.outputs}
        read = any(self.readers[index] for index in outputs)
        return not (read or step.into_view or outputs & self.returned)

    def steps(self, values: Iterable[int]) -> set[int]:
        """Return the steps that make or read any of the values."""
        found = {self.producer[v].index for v in values if v in self.producer}
        return found | {step.index for v in values for step in self.readers[v]}


@dataclass(eq=False)
class Flow:
    """What :func:`follow` found.

    Attributes:
        cut: Values that have the axis.
        partial: Values that are partial, and the module at whose end they are summed.
        summed: Values whose gradients are partial values, and the modules at whose beginning they
            are summed.
        replicated: Parameters that are whole and whose gradients are partial values.
        biases: Whole parameters that are added to partial values.
        added: Values that are these parameters, or linear in one of them.
    """

    cut: set[int]
    partial: dict[int, str] = field(default_factory=dict[int, str])
    summed: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    replicated: set[str] = field(default_factory=set[str])
    biases: set[str] = field(default_factory=set[str])
    added: set[int] = field(default_factory=set[int])

    @property
    def entries(self) -> set[str]:
        return set[str]().union(*self.summed.values())


def follow(graph: Graph, atom: int) -> Flow:
    """Follow one cut axis through the forward and back.

    Raises:
        RefusedError: If it cannot be cut.
    """
    flow = Flow(cut=graph.carriers[atom])
    _forward(graph, atom, flow)
    _check_biases(graph, flow)
    _backward(graph, flow)
    return flow


def _where(step: Step) -> str:
    return f"in {step.module!r}" if step.module else "in the model's own forward"


def is_within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")


# ---------------------------------------------------------------------- forward


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
        summed = [v for v in step.inputs if _is_partial(flow, v, step)]
        if summed and not graph.is_dead(step):
            _spread(graph, flow, step, _pass_on(graph, flow, step, summed), waiting, seen)


def _forward(graph: Graph, atom: int, flow: Flow) -> None:
    waiting = sorted(graph.steps(flow.cut))
    seen = set(waiting)
    while waiting:
        step = graph.trace.steps[heapq.heappop(waiting)]
        summed = [v for v in step.inputs if _is_partial(flow, v, step)]
        if graph.is_dead(step):
            continue
        if atom in graph.trace.axes.atoms(step.looked_up):
            raise RefusedError(f"is looked up by an index {_where(step)}")
        if step.index in graph.contracts[atom]:
            made_at = _contract(graph, flow, step, summed)
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
            f"its partial sums are written into a part of a tensor {_where(step)}, while the rest "
            "of that tensor is whole"
        )
    for value in step.outputs:
        flow.partial[value.index] = made_at
        for reader in graph.readers[value.index]:
            if reader.index not in seen:
                seen.add(reader.index)
                heapq.heappush(waiting, reader.index)


def _is_partial(flow: Flow, value: Value, step: Step) -> bool:
    made_at = flow.partial.get(value.index)
    return made_at is not None and is_within(step.module, made_at)


def _contract(graph: Graph, flow: Flow, step: Step, summed: list[Value]) -> str:
    """Return where the sum of a contraction with a parameter is taken."""
    having = [v for v in step.inputs if v.index in flow.cut]
    if summed or len(having) < 2 or all(v.from_batch or not v.from_parameter for v in having):
        raise RefusedError(
            f"{step.operator} {_where(step)} reduces over this dimension of an activation, so "
            "every rank needs all of it"
        )
    if not any(v.from_batch for v in having):
        raise RefusedError(
            f"{step.operator} {_where(step)} reduces over this dimension of two parameters, with "
            "no activation that could be summed over ranks"
        )
    _add_biases(graph, flow, step, [v for v in step.inputs if v.index not in flow.cut])
    return step.module


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
                    f"{step.operator} {_where(step)} adds a tensor that every rank has to its "
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
                if value.index not in flow.added and not _is_partial(flow, value, step):
                    raise RefusedError(
                        f"the bias that is added to its partial sums is used by {step.operator} "
                        f"{_where(step)}, too"
                    )


def _pass_on(graph: Graph, flow: Flow, step: Step, summed: list[Value]) -> str:
    if any(value.index in flow.cut for value in step.inputs + step.outputs):
        raise RefusedError(
            f"{step.operator} {_where(step)} combines its shards with its partial sums"
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
            f"{step.operator} {_where(step)} is not linear and comes before that module returns, "
            "where its partial sums would be summed over ranks"
        )
    return flow.partial[summed[0].index]


# ---------------------------------------------------------------------- backward


class _Again(Exception):
    """Gradients must not be summed at the beginning of these modules, but further out."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules


def _backward(graph: Graph, flow: Flow) -> None:
    # That a module must not sum its inputs' gradients can show at a value made before it, when
    # what follows from the sum was decided already: start over, without that sum.
    unsummed: set[str] = set()
    while True:
        flow.summed.clear()
        flow.replicated.clear()
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
    return value.index in flow.cut or _is_partial(flow, value, step)


def _collect(
    graph: Graph, flow: Flow, value: Value, partial: set[int], unsummed: set[str]
) -> bool:
    """Return whether a value's gradient is a partial value where the value is made."""
    raw, whole = list[Step](), list[Value]()
    summed: set[str] = set()
    for step in graph.readers[value.index]:
        if _is_partial(flow, value, step):
            continue
        is_partial, others = _contributions(flow, step, value, partial)
        whole += others
        if is_partial:
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
            raise RefusedError(f"its partial sums are used by its shards {_where(raw[0])}")
    flow.summed[value.index] = summed
    return bool(raw)


def _contributions(
    flow: Flow, step: Step, value: Value, partial: set[int]
) -> tuple[bool, list[Value]]:
    """Return whether a step makes a gradient partial, and its outputs that add a whole one."""
    is_partial, whole = False, list[Value]()
    for out in step.outputs:
        if not out.has_grad:
            continue
        is_part = _is_partial(flow, out, step) and value.index not in flow.added
        if is_part or out.index in flow.cut or out.index in partial:
            is_partial = True
        else:
            whole.append(out)
    return is_partial, whole


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
                f"a tensor is used by its shards and by {made_by.operator} {_where(made_by)}, "
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
