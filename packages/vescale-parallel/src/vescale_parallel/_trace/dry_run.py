"""Run a whole model, or one rank's part of it, without memory, and note how modules are called."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.copies import drop_hooks, snapshot
from vescale_parallel._torch_private import FakeTensorMode, TorchDispatchMode, pytree

from .fake_tensors import all_integer, bind, fake_batch, fake_output, skeleton
from .generators import untouched_generators


class DryRunError(ValueError):
    """A model, or one rank's part of it, does not run; names the module."""

    def __init__(self, fqn: str, error: Exception) -> None:
        super().__init__(f"in module {fqn!r}: {type(error).__name__}: {error}")
        self.fqn = fqn


@dataclass(frozen=True)
class ModuleCall:
    """What a module was called with and returned: trees of fake floats and real integers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


def dry_run_whole(model: nn.Module, batch: Any, watched: Collection[str]) -> dict[str, ModuleCall]:
    """Return the first call of every watched module in a forward of the whole model.

    Raises:
        DryRunError: If the forward needs values.
    """
    return dry_run(model, bind(model, opened(batch)), watched, lambda _: None)


def readers_of(model: nn.Module, batch: Any) -> dict[str, set[str]]:
    """Return the modules in whose own forward each parameter, tied names included, is read.

    Raises:
        DryRunError: If the forward needs values.
    """
    found: dict[int, set[str]] = {}
    named: dict[str, int] = {}

    def prepare(copied: nn.Module) -> None:
        named.update((n, id(p)) for n, p in copied.named_parameters(remove_duplicate=False))
        kept.append(copied)

    kept: list[nn.Module] = []  # or identities would be used again
    dry_run(model, bind(model, opened(batch)), (), prepare, found)
    return {fqn: found.get(identity, set()) for fqn, identity in named.items()}


def opened(batch: Any) -> Any:
    """Return a batch that pytree opens: not every mapping is one for it."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def dry_run(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    watched: Collection[str],
    prepare: Callable[[nn.Module], None],
    readers: dict[int, set[str]] | None = None,
) -> dict[str, ModuleCall]:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = skeleton(model, fake_mode)
    drop_hooks(copied)
    with fake_mode:
        prepare(copied)
    calls: dict[str, ModuleCall] = {}
    inside: list[str] = []
    mode = _FloatsAreFake(fake_mode, inside, readers)
    for first, others in equal_blocks(copied):
        _repeat(copied, first, others)
    for fqn, module in copied.named_modules():
        _watch(fqn, module, inside, calls if fqn in watched else None)
    # A forward may change objects that it is given, caches for example.
    args, kwargs = snapshot(fake_batch(given, fake_mode))
    try:
        with untouched_generators(), torch.enable_grad(), _quiet(), mode:
            copied(*args, **kwargs)
    # Arbitrary user code: whatever it raises means that it cannot be dry run.
    except Exception as error:
        raise DryRunError(inside[-1] if inside else "", error) from error
    return calls


def equal_blocks(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield runs of equal blocks: the second one of a stack, and those behind but the last."""
    for stack in block_stacks(model):
        kinds = [_kind(model.get_submodule(fqn)) for fqn in stack]
        middle = [fqn for fqn, kind in zip(stack, kinds, strict=True) if kind == kinds[1]]
        if len(middle) == len(stack) > 3:
            yield stack[1], list(stack[2:-1])


def _kind(module: nn.Module) -> object:
    layout = [(name, type(each)) for name, each in module.named_modules()]
    return layout, [(name, p.shape, p.dtype) for name, p in module.named_parameters()]


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


def _watch(
    fqn: str, module: nn.Module, inside: list[str], calls: dict[str, ModuleCall] | None
) -> None:
    given: list[tuple[Any, Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(fqn)
        if calls is not None and fqn not in calls:
            given.append(snapshot((args, kwargs)))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        inside.pop()
        if calls is not None and fqn not in calls:
            calls[fqn] = ModuleCall(*given.pop(), snapshot(output))

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)


class _FloatsAreFake(TorchDispatchMode):
    """Runs operators on fake tensors, and for real if all they see and give is integer."""

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        inside: Sequence[str] = (),
        readers: dict[int, set[str]] | None = None,
    ) -> None:
        super().__init__()
        self._fake_mode, self._inside, self._readers = fake_mode, inside, readers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if self._readers is not None:
            where = self._inside[-1] if self._inside else ""
            for each in inputs:
                self._readers.setdefault(id(each), set()).add(where)
        if all_integer(inputs, kwargs, func, args):
            return func(*args, **kwargs)
        return fake_output(func, args, kwargs, self._fake_mode)
