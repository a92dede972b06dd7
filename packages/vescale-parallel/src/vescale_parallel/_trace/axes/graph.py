"""What one forward did to axes: tensors, the operators between them, and what stops an axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from vescale_parallel._model.fqns import generalize
from vescale_parallel._trace.fake_tensors import is_float

from .algebra import Axes, Dim

# Which inputs of an operator its output is linear in: none, all of them together (a sum), each
# of them alone (a product), the first alone, or the last alone.
Linearity = Literal["no", "jointly", "each", "first", "last"]


# A module's FQN, and the position or name of an argument of its forward.
Argument = tuple[str, int | str]


@dataclass(eq=False)
class Value:
    """A tensor of the forward, as its dimensions.

    Attributes:
        index: Its place among all values.
        dims: One for each of its dimensions.
        nbytes: Of the whole tensor.
        parameter: FQN if it is a parameter.
        from_batch: Whether it depends on the batch.
        from_parameter: Whether it depends on a parameter.
        has_grad: Whether it is floating-point and depends on a parameter that is trained, or
            on a floating-point input.
        is_float: Whether it is floating-point.
        is_zero: Whether it is made of zeros.
    """

    index: int
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    nbytes: int
    parameter: str | None = None
    from_batch: bool = False
    from_parameter: bool = False
    has_grad: bool = False
    is_float: bool = False
    is_zero: bool = False


@dataclass(eq=False)
class Step:
    """One call of an operator.

    Attributes:
        index: Its place among all steps.
        module: FQN of the innermost module that was running.
        operator: Its name without overload.
        inputs: Tensors read.
        outputs: Tensors made, or written.
        linear: See :data:`Linearity`.
        contracted: Dimensions that were multiplied and summed, or only summed.
        looked_up: Dimension whose elements were chosen by an index, of an embedding.
        flops: Floating-point operations.
        writes: Whether it wrote into a tensor.
        into_view: Whether it wrote some elements of a larger tensor.
    """

    index: int
    module: str
    operator: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    linear: Linearity
    contracted: list[Dim] = field(default_factory=list[Dim])
    looked_up: Dim = ()
    flops: int = 0
    writes: bool = False
    into_view: bool = False


@dataclass(frozen=True)
class Obstacle:
    """Why a dimension cannot be cut, unless ranks read their parts of what it is of.

    Attributes:
        buffer: FQN, of a buffer.
        argument: Of a module's argument, in :attr:`Trace.given`.
    """

    dim: Dim
    why: str
    module: str
    buffer: str = ""
    argument: Argument | None = None


@dataclass(frozen=True)
class UnknownOperator:
    """An operator without a rule that read something with a gradient."""

    operator: str
    module: str


# A tensor, its value outside of a module, and that within it.
Entered = tuple[torch.Tensor, Value, Value]


@dataclass
class Trace:
    """One forward.

    Attributes:
        called: Modules to the position or name, and the value's index, of each floating-point
            tensor that a call of theirs had as an argument.
        given: Arguments that depend on no parameter and have no gradient, to what they are
            within the module, in each of its calls: :meth:`enter`.
        made_in: Values to the modules that made them.
    """

    axes: Axes = field(default_factory=Axes)
    values: list[Value] = field(default_factory=list[Value])
    steps: list[Step] = field(default_factory=list[Step])
    obstacles: list[Obstacle] = field(default_factory=list[Obstacle])
    experts: list[tuple[Dim, str]] = field(default_factory=list[tuple[Dim, str]])
    unknown: list[UnknownOperator] = field(default_factory=list[UnknownOperator])
    returned: list[Value] = field(default_factory=list[Value])
    parameters: dict[str, Value] = field(default_factory=dict[str, Value])
    buffers: dict[str, Value] = field(default_factory=dict[str, Value])
    made_in: dict[int, str] = field(default_factory=dict[int, str])
    called: dict[str, list[tuple[int | str, int]]] = field(
        default_factory=dict[str, list[tuple[int | str, int]]]
    )
    given: dict[Argument, list[Value]] = field(default_factory=dict[Argument, list[Value]])
    _current: Any = field(default_factory=WeakIdKeyDictionary)

    def add(self, tensor: torch.Tensor, dims: Sequence[Dim] | None = None, **facts: Any) -> Value:
        """Give a tensor a value, of fresh axes unless told which; it replaces an older one."""
        if dims is None:
            dims = [self.axes.fresh(length) for length in tensor.shape]
        value = Value(
            index=len(self.values),
            dims=tuple(dims),
            shape=tuple(tensor.shape),
            nbytes=tensor.numel() * tensor.element_size(),
            is_float=is_float(tensor.dtype),
            **facts,
        )
        self.values.append(value)
        self._current[tensor] = value
        return value

    def source(self, tensor: torch.Tensor, name: str, *, buffer: str = "", **facts: Any) -> Value:
        """Give a value to a tensor whose elements differ and are not parameters."""
        value = self.add(tensor, **facts)
        why = f"{name} has an element for each"
        self.obstacles += [Obstacle(dim, why, "", buffer) for dim in value.dims if dim]
        return value

    def call(self, module: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what a module is called with."""
        given = [*enumerate(args), *kwargs.items()]
        known = [(at, self._current.get(x)) for at, x in given if isinstance(x, torch.Tensor)]
        self.called[module] = [(at, v.index) for at, v in known if v is not None and v.is_float]

    def enter(self, module: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Entered]:
        """Give values of their own to arguments of which ranks may read parts.

        Within a module they are what they are whatever made them: biases of ALiBi are numbered
        by heads, and blocks that are given a rank's part of them need not know of the others.
        What another block like this one has made is a rank's already, if it is of its heads: T5's
        first block makes the biases of all.
        """
        entered: list[Entered] = []
        for at, tensor in [*enumerate(args), *kwargs.items()]:
            outside = self._current.get(tensor) if isinstance(tensor, torch.Tensor) else None
            if outside is None or not outside.is_float or not any(outside.dims):
                continue
            if outside.has_grad or outside.from_parameter or self._is_of_alike(outside, module):
                continue
            inside = self.add(tensor, from_batch=outside.from_batch, is_zero=outside.is_zero)
            why = f"argument {at!r} has an element for each"
            self.given.setdefault((module, at), []).append(inside)
            self.obstacles += [
                Obstacle(dim, why, module, argument=(module, at)) for dim in inside.dims if dim
            ]
            entered.append((tensor, outside, inside))
        return entered

    def _is_of_alike(self, value: Value, module: str) -> bool:
        maker = generalize(self.made_in.get(value.index, ""))
        return f"{maker}.".startswith(f"{generalize(module)}.")

    def leave(self, entered: Iterable[Entered]) -> None:
        """Take back what :meth:`enter` gave, but of tensors that were written since."""
        for tensor, outside, inside in entered:
            if self._current[tensor] is inside:
                self._current[tensor] = outside

    def value(self, tensor: torch.Tensor) -> Value:
        found: Value | None = self._current.get(tensor)
        if found is None or found.shape != tuple(tensor.shape):
            return self.source(tensor, "a constant")
        return found


@dataclass(eq=False)
class OpCall:
    """One operator being run: what a rule reads, and where it says what it found.

    Attributes:
        name: Of the operator, without overload and without what marks it as in place.
        args: By the names of the operator's schema, defaults filled in.
        inputs: Tensors among ``args``, in order.
        outputs: Tensors returned.
    """

    trace: Trace
    name: str
    module: str
    args: dict[str, Any]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    step: Step
    made: dict[int, Sequence[Dim]] = field(default_factory=dict[int, Sequence[Dim]])

    @property
    def axes(self) -> Axes:
        return self.trace.axes

    @property
    def out(self) -> torch.Tensor:
        return self.outputs[0]

    def dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        return self.trace.value(tensor).dims

    def give(self, tensor: torch.Tensor, dims: Sequence[Dim]) -> None:
        """Say what an output's dimensions are."""
        for position, output in enumerate(self.outputs):
            if output is tensor:
                self.made[position] = dims

    def unify(self, one: Dim, other: Dim) -> None:
        if not self.axes.unify(one, other):
            self.block(one, "meets a dimension that is divided differently")
            self.block(other, "meets a dimension that is divided differently")

    def block(self, dim: Dim, why: str = "") -> None:
        """Say that the operator needs all of a dimension."""
        if dim:
            why = why or f"{self.name} needs all of it"
            self.trace.obstacles.append(Obstacle(dim, why, self.module))

    def note_experts(self, tensor: torch.Tensor) -> None:
        """Say that elements of a parameter's first dimension are used one by one."""
        value = self.trace.value(tensor)
        if value.from_parameter and not value.from_batch and len(value.dims) > 1:
            self.trace.experts.append((value.dims[0], self.module))

    def contract(self, dim: Dim) -> None:
        self.step.contracted.append(dim)

    def fresh(self, length: int) -> Dim:
        return self.axes.fresh(length)

    def whole(self, length: int) -> Dim:
        """Return a new dimension that the operator makes, and that cannot be made in parts."""
        dim = self.fresh(length)
        self.block(dim, f"comes whole out of {self.name}")
        return dim

    def block_all(self, tensors: Iterable[torch.Tensor], why: str = "") -> None:
        for tensor in tensors:
            for dim in self.dims(tensor):
                self.block(dim, why)
