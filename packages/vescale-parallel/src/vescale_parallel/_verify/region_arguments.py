"""Gradients of what modules are called with, and the parameters that they flow back to.

[Note: gradients that examples hide] What a region is given besides its first activation, as
experts are given the weights of a router, has a partial gradient on every rank unless it enters,
too. Parameters and inputs show that, by the gradients that reach them; but what is between may let
none through in an example, and let it through later: weights that are divided by their sum are
constant while a table routes all tokens to one expert, as one of zeros does before a checkpoint is
read; other routers are constant in evaluation alone. So gradients are also compared where regions
begin. One that is partial there has to end in parameters that are known to have partial gradients,
in nothing else. Where a parameter's own gradient is zero, whether it is partial is decided by that
of what modules of its region are called with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.shard_module import placement_between, rank_part
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding

from .compared_results import close, largest_of
from .region import Contradiction

# (module FQN, argument, number of the call of that module)
Call = tuple[str, str, int]


class ArgumentsOfCalls:
    """What modules were called with, and its gradients.

    Args:
        fqns: The modules.
        keep_values: Whether to keep arguments, not their gradients alone.

    Attributes:
        values: Every floating-point argument with a gradient, and its history, if it is kept.
        grads: Of those that a gradient reached.
        names: Of the module's parameters, by identity, likewise.
    """

    def __init__(self, fqns: Iterable[str], *, keep_values: bool) -> None:
        self._fqns, self._keeps_values = tuple(fqns), keep_values
        self.values: dict[Call, Tensor] = {}
        self.grads: dict[Call, Tensor] = {}
        self.names: dict[int, str] = {}

    def listen(self, module: nn.Module) -> None:
        """Listen to calls of modules below one; hooks added before change what is seen."""
        if self._keeps_values:
            self.names.update((id(p), fqn) for fqn, p in module.named_parameters())
        for fqn in self._fqns:
            self._watch_calls(module.get_submodule(fqn), fqn)

    def listen_behind(self, module: nn.Module) -> None:
        """Do nothing: what enters is looked at before."""

    def _watch_calls(self, module: nn.Module, fqn: str) -> None:
        names = list(inspect.signature(module.forward).parameters)
        calls = 0

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal calls
            calls += 1
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    call = fqn, name, calls
                    if self._keeps_values:
                        self.values[call] = value
                    # Of nothing else: a hook of a tensor that is kept here, which the garbage
                    # collector does not see, would keep it for ever.
                    value.register_hook(functools.partial(_keep, self.grads, call))

        module.register_forward_pre_hook(before, with_kwargs=True)


def _keep(grads: dict[Call, Tensor], call: Call, grad: Tensor) -> None:
    grads[call] = grad.detach()


@dataclass(frozen=True)
class Entrances:
    """Where activations enter regions, in a block or a model.

    Attributes:
        fqn: Of the block; names below are from there.
        arguments: Module to the arguments that enter; empty for the first activation.
        linears: Column-wise linear layers in no region: what they are called with enters.
    """

    fqn: str
    arguments: Mapping[str, Set[str]]
    linears: Set[str]

    def has(self, call: Call, first: str) -> bool:
        """Return whether an argument enters, where ``first`` is the first activation."""
        module, argument, _ = call
        entering = self.arguments.get(module, ())
        is_first = argument == first
        return argument in entering or (is_first and ("" in entering or module in self.linears))

    def full(self, name: str) -> str:
        return f"{self.fqn}.{name}".strip(".")


def entrances(module: nn.Module, fqn: str, sharding: TensorSharding) -> Entrances:
    """Return where activations enter regions in a module, ``fqn`` in its model."""
    below = f"{fqn}." if fqn else ""
    arguments: dict[str, set[str]] = {}
    for entered, argument in sharding.spec.entered:
        if entered.startswith(below):
            arguments.setdefault(entered.removeprefix(below), set()).add(argument)
    linears: set[str] = set()
    for name, each in module.named_modules():
        kind = linear_kind(each)
        placement = sharding.placements.get(f"{below}{name}.weight")
        is_inside = any(not region or f"{name}.".startswith(f"{region}.") for region in arguments)
        if kind is not None and getattr(placement, "dim", None) == kind.out_dim and not is_inside:
            linears.add(name)
    return Entrances(fqn, arguments, linears)


@dataclass(frozen=True)
class ComparedArguments:
    """The arguments of calls on one device and on ranks.

    Attributes:
        entering: Where activations enter.
        whole: On one device, with values.
    """

    entering: Entrances
    whole: ArgumentsOfCalls
    ranks: Sequence[ArgumentsOfCalls]

    def check(self, partial: Collection[str]) -> None:
        """Compare gradients where regions begin: [Note: gradients that examples hide].

        ``partial`` are whole parameters, by their FQNs in the model, with partial gradients.

        Raises:
            Contradiction: If ranks have another gradient, and it flows back to anything else.
        """
        for call, value in self.whole.values.items():
            module, argument, _ = call
            if module not in self.entering.arguments or self._are_shards(call):
                continue
            if not self._above(value, frozenset()).issubset(partial):
                why = f"the gradient of its argument {argument!r} differs"
                raise Contradiction(self.entering.full(module), why)

    def parameters_of_partial(self) -> set[str]:
        """Return the parameters, by FQN, that partial gradients flow back to within regions."""
        ends = frozenset(
            value.grad_fn
            for call, value in self.whole.values.items()
            if value.grad_fn is not None and self.entering.has(call, self._first(call))
        )
        found: set[str] = set()
        for call, value in self.whole.values.items():
            if self._is_sum(call):
                found |= self._above(value, ends)
        return found

    def _first(self, call: Call) -> str:
        module, _, number = call
        return next(a for m, a, n in self.whole.values if (m, n) == (module, number))

    def _are_shards(self, call: Call) -> bool:
        """Return whether ranks have a gradient, or their shards of it; none is zero."""
        whole, grads = self._grads(call)
        if whole is None:
            return True
        size, largest = len(grads), largest_of(whole)
        first = next((grad for grad in grads if grad is not None), whole)
        placement = placement_between(whole, first, size)
        if placement is None:
            return True  # shapes are compared elsewhere
        parts = [rank_part(whole, placement, size, rank) for rank in range(size)]
        return all(
            close(torch.zeros_like(part) if grad is None else grad, part, largest)
            for grad, part in zip(grads, parts, strict=True)
        )

    def _is_sum(self, call: Call) -> bool:
        """Return whether ranks have other gradients, which add up to the one."""
        whole, grads = self._grads(call)
        if whole is None or any(grad is None or grad.shape != whole.shape for grad in grads):
            return False
        total = torch.stack([grad for grad in grads if grad is not None]).sum(0)
        return not self._are_shards(call) and close(total, whole, largest_of(whole))

    def _grads(self, call: Call) -> tuple[Tensor | None, list[Tensor | None]]:
        return self.whole.grads.get(call), [run.grads.get(call) for run in self.ranks]

    def _above(self, value: Tensor, ends: Set[Node]) -> set[str]:
        """Return the parameters that a value was computed from, by FQN; inputs are empty."""
        names = [self.whole.names.get(id(leaf)) for leaf in _leaves(value, ends)]
        return {"" if name is None else self.entering.full(name) for name in names}


def _leaves(value: Tensor, ends: Set[Node]) -> Iterator[Tensor]:
    """Yield the tensors without history that a value was computed from, not behind ``ends``."""
    if value.grad_fn is None:
        yield value
        return
    waiting = [value.grad_fn] if value.grad_fn not in ends else []
    seen: set[Node] = {value.grad_fn, *ends}
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
