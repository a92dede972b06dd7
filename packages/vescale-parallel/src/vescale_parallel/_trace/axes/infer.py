"""Run a model on fakes and follow its axes through every operator."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.fake_run import FakeRun, Listener, Operator
from vescale_parallel._trace.fake_tensors import is_float
from vescale_parallel._trace.flops import flops_of

from .graph import Entered, Linearity, OpCall, Step, Trace, UnknownOperator, Value
from .registry import Rule
from .rules import (
    attention,
    indexing,
    normalisation,
    planes,
    pointwise,
    products,
    reductions,
    views,
)

_RULES = {
    **attention.rule,
    **indexing.rule,
    **normalisation.rule,
    **planes.rule,
    **pointwise.rule,
    **products.rule,
    **reductions.rule,
    **views.rule,
}
# They make elements that differ, of nothing; what else makes tensors of nothing is uniform.
_DIFFERENT = frozenset(
    ("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "randperm",
     "rand", "randn", "randint", "range", "normal_functional", "hann_window")
)  # fmt: skip
_ZERO = frozenset(("zeros", "zeros_like", "new_zeros", "zero"))
# Of these every output that is not zero is zero where the first input is.
_KEEPS_ZERO = frozenset(("view", "to_copy", "expand", "clone", "unsqueeze", "transpose"))


def infer_axes(model: nn.Module, batch: Any, *, all_trained: bool = False) -> Trace:
    """Run one forward of a copy of the model that has shapes and no memory.

    Args:
        model: May be real, on the meta device, or deferred; it is not changed.
        batch: As in :func:`vescale_parallel.observe`.
        all_trained: Whether to find where gradients are summed as if no parameter were frozen.

    Raises:
        ObservationError: If the forward needs values that a fake tensor does not have.
    """
    batch = opened(batch)
    run = FakeRun(model)
    recorder = _Recorder(run, all_trained)
    args, kwargs = bind(run.model, run.batch(batch))
    recorder.sources(args, kwargs)
    with torch.no_grad(), _every_operator():
        output = run.forward((args, kwargs), recorder)
    leaves = pytree.tree_leaves(output)
    recorder.trace.returned += [recorder.trace.value(t) for t in leaves if _is_tensor(t)]
    return recorder.trace


@contextlib.contextmanager
def _every_operator() -> Iterator[None]:
    """Keep torch from taking one operator for all of a transformer's block."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Recorder(Listener):
    """Applies every operator's rule and adds it to a trace."""

    def __init__(self, run: FakeRun, all_trained: bool) -> None:
        self._run, self._all_trained, self.trace = run, all_trained, Trace()
        self._entered: list[list[Entered]] = []

    def sources(self, args: Any, kwargs: Any) -> None:
        """Give axes to parameters, buffers and the batch."""
        trace = self.trace
        made: dict[int, Value] = {}
        for fqn, parameter in self._run.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                trained = parameter.requires_grad or self._all_trained
                made[id(parameter)] = trace.add(
                    parameter,
                    parameter=fqn,
                    from_parameter=True,
                    has_grad=trained and is_float(parameter.dtype),
                )
            trace.parameters[fqn] = made[id(parameter)]
        for fqn, buffer in self._run.model.named_buffers():
            trace.buffers[fqn] = trace.source(buffer, f"buffer {fqn!r}", buffer=fqn)
        for tensor in filter(_is_tensor, pytree.tree_leaves((args, kwargs))):
            has_grad = is_float(tensor.dtype)
            trace.source(tensor, "the batch", from_batch=True, has_grad=has_grad)

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._entered.append(self.trace.enter(fqn, args, kwargs) if fqn else [])
        self.trace.call(fqn, args, kwargs)

    def left(self, fqn: str, output: Any) -> None:
        self.trace.leave(self._entered.pop())

    def raised(self, fqn: str) -> None:
        self.trace.leave(self._entered.pop())

    def operator(self, ran: Operator) -> None:
        outputs = tuple(filter(_is_tensor, pytree.tree_leaves(ran.output)))
        if not outputs:
            return
        trace = self.trace
        func, inputs, module = ran.func, tuple(ran.inputs), self._run.fqn
        named = _named(func, ran.args, ran.kwargs)
        name = _name(func)
        values = tuple(trace.value(tensor) for tensor in inputs)
        rule, linear = _rule(func, name)
        step = Step(
            index=len(trace.steps),
            module=module,
            operator=name,
            inputs=values,
            outputs=(),
            linear="no" if _adds_number(name, named) else linear,
            flops=0 if ran.is_integer else _flops(ran),
            writes=func._schema.is_mutable,
            into_view=func._schema.is_mutable and _is_part(ran.args[0]),
        )
        call = OpCall(trace, name, module, named, inputs, outputs, step)
        if not inputs:
            self._constructed(call)
        elif rule is not None:
            rule(call)
        else:
            self._unknown(call)
        step.outputs = tuple(self._output(call, p) for p in range(len(outputs)))
        trace.steps.append(step)
        trace.made_in |= {value.index: module for value in step.outputs}

    def _output(self, call: OpCall, position: int) -> Value:
        tensor, step = call.outputs[position], call.step
        old = [self.trace.value(t) for t in call.inputs if t is tensor]
        dims = call.made.get(position) or (old[0].dims if old else None)
        if dims is None:
            dims = [call.whole(n) for n in tensor.shape]
        grads = any(value.has_grad for value in step.inputs) and call.name != "detach"
        first_zero = bool(step.inputs) and step.inputs[0].is_zero
        return self.trace.add(
            tensor,
            dims,
            from_batch=any(value.from_batch for value in step.inputs),
            from_parameter=any(value.from_parameter for value in step.inputs),
            has_grad=grads and is_float(tensor.dtype) and not call.name.endswith("_like"),
            is_zero=call.name in _ZERO or (call.name in _KEEPS_ZERO and first_zero),
        )

    def _constructed(self, call: OpCall) -> None:
        for out in call.outputs:
            dims = [call.fresh(n) for n in out.shape]
            call.give(out, dims)
            if call.name in _DIFFERENT:
                for dim in dims:
                    call.block(dim, f"is numbered by {call.name}")

    def _unknown(self, call: OpCall) -> None:
        call.block_all(call.inputs, f"meets {call.name}, which has no rule")
        if any(value.from_parameter for value in call.step.inputs):
            self.trace.unknown.append(UnknownOperator(call.name, call.module))


def _flops(ran: Operator) -> int:
    return flops_of(ran.func, ran.args, ran.kwargs, ran.output) or 0


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of some elements of another."""
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _rule(func: Any, name: str) -> tuple[Rule | None, Linearity]:
    found = _RULES.get(name)
    if found is not None:
        return found
    return (pointwise.pointwise if torch.Tag.pointwise in func.tags else None), "no"


@functools.cache
def _name(func: Any) -> str:
    """Return an operator's name without namespace, overload and what marks it as in place."""
    return func._schema.name.rpartition("::")[2].strip("_")


@functools.cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return tuple(a.name for a in arguments), defaults


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _adds_number(name: str, args: dict[str, Any]) -> bool:
    """Whether an operator adds a number to a tensor, which a sum of parts must not see."""
    if name not in ("add", "sub", "rsub", "masked_fill"):
        return False
    other = args["value"] if name == "masked_fill" else args.get("other")
    if name == "masked_fill" and _is_tensor(other):
        return True
    return isinstance(other, int | float) and not math.isclose(other, 0.0)
