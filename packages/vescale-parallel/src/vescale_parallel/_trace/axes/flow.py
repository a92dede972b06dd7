"""A forward as a graph, and what is found where one of its axes is sharded.

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

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .graph import Step, Trace, Value


class RefusedError(Exception):
    """An axis cannot be cut; the message says why.

    Plans print it behind the name of a parameter and its dimension: it says what there is about
    "this dimension", to someone who knows the model and not this package.

    Attributes:
        needed_in: The module with an operator that needs all of the axis, if that is why.
    """

    def __init__(self, why: str, needed_in: str | None = None) -> None:
        super().__init__(why)
        self.needed_in = needed_in


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
        reentered: Modules that return partial values which are used by what is cut once they are
            summed: their gradients are partial values, too, and are summed where they end.
        summed: Values whose gradients are partial values, and the modules at whose beginning they
            are summed.
        replicated: Parameters that are whole and whose gradients are partial values.
        biases: Whole parameters that are added to partial values.
        added: Values that are these parameters, or linear in one of them.
    """

    cut: set[int]
    partial: dict[int, str] = field(default_factory=dict[int, str])
    reentered: set[str] = field(default_factory=set[str])
    summed: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    replicated: set[str] = field(default_factory=set[str])
    biases: set[str] = field(default_factory=set[str])
    added: set[int] = field(default_factory=set[int])

    @property
    def entries(self) -> set[str]:
        return set[str]().union(*self.summed.values())


def is_partial(flow: Flow, value: Value, step: Step) -> bool:
    """Whether a value is a partial one where a step reads or makes it."""
    made_at = flow.partial.get(value.index)
    return made_at is not None and is_within(step.module, made_at)


def where(step: Step) -> str:
    """Return where a step runs, for messages."""
    return f"in {step.module!r}" if step.module else "in the model's own forward"


def is_within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")
