"""Dry runs: a whole model, or one rank's part, on fake tensors, and how its modules are called."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.copies import snapshot
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._torch_private import pytree

from .fake_run import FakeRun, Listener, Operator


class DryRunError(ValueError):
    """A model, or one rank's part of it, does not run; names the module."""

    def __init__(self, fqn: str, error: Exception) -> None:
        super().__init__(f"in module {fqn!r}: {type(error).__name__}: {error}")
        self.fqn = fqn


def asks_for_values(error: DryRunError) -> bool:
    """Whether a forward does not run on shapes alone, however many rows there are."""
    return type(error.__cause__).__name__ in _ASKING


# What fake tensors raise, by name: the classes are private to torch.
_ASKING = frozenset(("DataDependentOutputException", "DynamicOutputShapeException"))


@dataclass(frozen=True)
class ModuleCall:
    """What a module was called with and returned: trees of fake floats and real integers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


def dry_run_whole(
    model: nn.Module,
    batch: Any,
    watched: Collection[str],
    *listeners: Listener,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> dict[str, ModuleCall]:
    """Return the first call of every watched module in a forward of the whole model.

    ``prepare`` changes the copy that is run.

    Raises:
        DryRunError: If the forward needs values.
    """
    given = bind(model, opened(batch))
    return dry_run(model, given, watched, prepare, lambda _: listeners)


def readers_of(model: nn.Module, batch: Any) -> dict[str, set[str]]:
    """Return the modules in whose own forward each parameter, tied names included, is read.

    Raises:
        DryRunError: If the forward needs values.
    """
    made: list[_Readers] = []

    def listen(run: FakeRun) -> tuple[Listener]:
        made.append(_Readers(run))
        return (made[0],)

    dry_run(model, bind(model, opened(batch)), (), lambda _: None, listen)
    return made[0].by_name()


def dry_run(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    watched: Collection[str],
    prepare: Callable[[nn.Module], None],
    make_listeners: Callable[[FakeRun], Sequence[Listener]] = lambda _: (),
) -> dict[str, ModuleCall]:
    """Return the first call of every watched module.

    ``prepare`` changes the copy that is run; ``make_listeners`` returns who else hears the run.

    Raises:
        DryRunError: If the forward raises.
    """
    run = FakeRun(model, refused=lambda run, error: DryRunError(run.fqn, error))
    with run.fake_mode:
        prepare(run.model)
    for first, others in equal_blocks(run.model):
        _repeat(run.model, first, others)
    calls = _Calls(watched)
    # A forward may change objects that it is given, caches for example.
    args, kwargs = snapshot(run.batch(given))
    with torch.enable_grad(), _quiet():
        run.forward((args, kwargs), calls, *make_listeners(run))
    return calls.found


def equal_blocks(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield runs of equal blocks, the first and the others; the ends of a stack are in none."""
    for stack in block_stacks(model):
        inner = [(fqn, model.get_submodule(fqn)) for fqn in stack[1:-1]]
        for _, run in itertools.groupby(inner, lambda each: (_kind(each[1]), _switches(each[1]))):
            first, *others = (fqn for fqn, _ in run)
            if others:
                yield first, others


def _kind(module: nn.Module) -> object:
    layout = [(name, type(each)) for name, each in module.named_modules()]
    return layout, [(name, p.shape, p.dtype) for name, p in module.named_parameters()]


def _switches(module: nn.Module) -> object:
    """Return what decides whether modules draw: a chance of zero does not, nor does evaluation."""
    return [
        (each.training, [k for k, value in vars(each).items() if type(value) is float and value])
        for each in module.modules()
    ]


def _repeat(model: nn.Module, first: str, others: Sequence[str]) -> None:
    """Have blocks return what an equal one returned: tensors have no values here."""
    returned: list[Any] = []

    def fresh(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad)

    def note(_: nn.Module, args: Any, output: Any) -> None:
        returned[:] = [output]

    def again(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(Tensor, fresh, returned[0])

    model.get_submodule(first).register_forward_hook(note)
    for fqn in others:
        model.get_submodule(fqn).forward = again


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep fake tensors from logging errors: shapes that do not fit are an answer here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Calls(Listener):
    """Keeps the first call of every watched module."""

    def __init__(self, watched: Collection[str]) -> None:
        self.found: dict[str, ModuleCall] = {}
        self._watched = frozenset(watched)
        self._given: dict[str, list[tuple[Any, Any]]] = {}

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if fqn in self._watched and fqn not in self.found:
            self._given.setdefault(fqn, []).append(snapshot((args, kwargs)))

    def left(self, fqn: str, output: Any) -> None:
        if fqn in self._watched and fqn not in self.found:
            self.found[fqn] = ModuleCall(*self._given[fqn].pop(), snapshot(output))

    def raised(self, fqn: str) -> None:
        if self._given.get(fqn):
            self._given[fqn].pop()


class _Readers(Listener):
    """Keeps the modules in whose own forward each parameter is read."""

    def __init__(self, run: FakeRun) -> None:
        self._run = run
        # With the tensors, or identities would be used again.
        self._read: dict[int, tuple[Tensor, set[str]]] = {
            id(parameter): (parameter, set()) for parameter in run.model.parameters()
        }

    def operator(self, ran: Operator) -> None:
        for each in ran.inputs:
            if id(each) in self._read:
                self._read[id(each)][1].add(self._run.fqn)

    def by_name(self) -> dict[str, set[str]]:
        named = self._run.model.named_parameters(remove_duplicate=False)
        return {fqn: self._read[id(parameter)][1] for fqn, parameter in named}
