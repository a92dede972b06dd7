"""Hooks that a model has put on its modules, as code of what calls these, over the same rows.

A hook keeps what a layer is given or returns, for the model's forward, or replaces it. Where rows
meet in what calls the layer, or in the hook, it is given those of all ranks as forward is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from vescale_parallel._cross_replica.hooks.pure_hooks import is_pure
from vescale_parallel._model.copies import is_of_module


@dataclass
class LeftCall:
    """A call that a region leaves to run on this rank's rows.

    Attributes:
        module: That is called.
        given: The arguments, of all rows: args and kwargs.
        parts: Makes the arguments of this rank's rows.
        whole: Makes what is returned whole.
        goes_on: Whether the region's code goes on behind it; not where it runs again in backward.
    """

    module: nn.Module
    given: tuple[Any, Any]
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]
    goes_on: bool


class OwnHook(functools.partial[Any]):
    """A hook of a model that runs when it is told to.

    A partial of the hook, so that copies of the module get one of their own.
    """

    run: Callable[..., Any]

    @property
    def _vescale_hook(self) -> Any:
        """What tensor parallelism runs, if it does: it is not to run this, too."""
        hook: Any = self.func
        return hook._vescale_hook

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it as :class:`OwnHooks` does."""
        return self.run(self.func, *args, **kwargs)


class OwnHooks:
    """Runs hooks of a model that are on the modules which regions enter or leave.

    Args:
        as_caller: Enters the code that has left a call, until it is left again.
    """

    def __init__(self, as_caller: Callable[[], AbstractContextManager[None]]) -> None:
        self._as_caller = as_caller
        # The region that is called on this rank's rows, whose hooks run within it.
        self._entered: nn.Module | None = None
        # What a hook before, or behind, the call that was last left or returned is given.
        self._left: LeftCall | None = None

    def put_on(self, module: nn.Module, modules: Container[int]) -> None:
        """Have the hooks of ``modules``, by identity, and pure ones that are on a module run so.

        They come behind those that leave it and return to its caller.
        """
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if isinstance(hook, OwnHook) or not (is_of_module(hook, modules) or is_pure(hook)):
                    continue
                if hooks is module._forward_hooks:
                    del hooks[key]
                is_before = hooks is module._forward_pre_hooks
                own = OwnHook(hook)
                own.run = self._before if is_before else self._behind
                hooks[key] = own

    def are_on(self, module: nn.Module) -> bool:
        """Whether there are such hooks on a module."""
        held = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(isinstance(hook, OwnHook) for hook in held)

    def begin(self, module: nn.Module, left: LeftCall | None, *, enters: bool) -> None:
        """Begin a call: of a region, on this rank's rows, or of a module that one leaves."""
        self._left = left
        self._entered = module if enters else None

    def forget(self) -> None:
        """Let go of what a call was given."""
        self._left = self._entered = None

    def returned(self, left: LeftCall) -> None:
        """Have the hooks behind a call that was left get what it was given."""
        self._left = left

    def before_all_rows(self, module: nn.Module, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return what hooks before a region make of its arguments, of all rows."""
        for key, hook in [*module._forward_pre_hooks.items()]:
            if isinstance(hook, OwnHook):
                is_named = key in module._forward_pre_hooks_with_kwargs
                made = hook.func(module, *(given if is_named else given[:1]))
                given = _arguments(made, given, is_named=is_named)
        return given

    def behind_all_rows(self, module: nn.Module, given: tuple[Any, Any], output: Any) -> Any:
        """Return what hooks behind a region make of its output, of all rows."""
        for key, hook in [*module._forward_hooks.items()]:
            if isinstance(hook, OwnHook):
                is_named = key in module._forward_hooks_with_kwargs
                made = hook.func(module, *(given if is_named else given[:1]), output)
                output = output if made is None else made
        # Calls within it have begun since.
        self._entered = module
        return output

    def _before(self, hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
        if self._entered is module:
            return None
        left = self._left
        if left is None or left.module is not module:
            return hook(module, *given)
        is_named = len(given) > 1
        with self._as_caller():
            made = hook(module, *(left.given if is_named else left.given[:1]))
            if made is None:
                return None
            left.given = _arguments(made, left.given, is_named=is_named)
            parts = left.parts(left.given)
        return parts if is_named else parts[0]

    def _behind(self, hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
        if self._entered is module:
            return None
        left = self._left
        if left is None or left.module is not module:
            return hook(module, *given)
        *_, output = given
        return hook(module, *left.given[: len(given) - 1], output)


def _arguments(made: Any, given: tuple[Any, Any], *, is_named: bool) -> tuple[Any, Any]:
    """Return the arguments that a hook before forward leaves, as torch takes what it returns."""
    if made is None:
        return given
    if is_named:
        args, kwargs = made
        return args, kwargs
    return made if isinstance(made, tuple) else (made,), given[1]
