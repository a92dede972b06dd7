"""Hooks of users, given whole activations where ranks have parts of them.

See [Note: what hooks see]. How activations lie over ranks is found once for a form of call, by
running the model on one device and on all ranks, and only if there are hooks. Where they are whole
hooks are given what is there, and nothing is sent.

What a hook does to a whole activation is done to the parts: what it returns, or writes in place,
goes on in shards. A tensor hook that it puts on what a module returns gets the whole gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn

from vescale_parallel._model.copies import is_of_user
from vescale_parallel._model.structures import flattened
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import (
    global_forward_hooks,
    global_forward_pre_hooks,
    left_out,
)

from .agreed import AgreedHooks
from .axis import Axis, Conversion, HookedCall, Slot, Unknown
from .seen import Seen

Hook = Callable[..., Any]
_LEFT_OUT = "a hook is given whole activations"
_CONVERTS = "vescale_parallel._tensor_parallel."
_BEFORE, _BEHIND = "_forward_pre_hooks", "_forward_hooks"
_BACKWARD, _BEFORE_BACKWARD = "_backward_hooks", "_backward_pre_hooks"
_KINDS = (_BEFORE, _BEHIND, _BACKWARD, _BEFORE_BACKWARD)


class WholeForHooks:
    """Gives hooks of users whole activations, in the calls of a model.

    Args:
        model: The model, changed as a plan says.
        axes: Along which ranks have parts of activations.
    """

    def __init__(self, model: nn.Module, axes: Sequence[tuple[Axis, AgreedHooks]]) -> None:
        self._axes = axes
        self._modules = [(fqn, module) for fqn, module in model.named_modules() if fqn]
        self._told: set[str] = set()
        # What is told when the call that runs has ended, None between calls.
        self._at_end: dict[str, str] | None = None

    @contextlib.contextmanager
    def proven(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Find what hooks see in a call of this form, and run the call inside."""
        hooked = list(_hooked(self._modules))
        of_backward = (each for each in hooked if each[2] in (_BACKWARD, _BEFORE_BACKWARD))
        fqns, backward = (frozenset(fqn for fqn, *_ in each) for each in (hooked, of_backward))
        call = HookedCall(model, args, kwargs, fqns, backward)
        for axis, agreed in self._axes:
            if hooked:
                axis.learn(call)
            sending = (each for each in hooked if axis.sends(each[0], _SLOTS[each[2]]))
            agreed.agree([*_places(sending)])
        for each in hooked:
            self._wrap(*each)
        self._tell_of_global_hooks()
        self._at_end = {}
        try:
            yield
            # Not of a call that has raised: how it lies could not be found for the same reason.
            for fqn, text in self._at_end.items():
                self._told.add(fqn)
                warn_at_user_line(text)
        finally:
            self._at_end = None

    def _tell_of_global_hooks(self) -> None:
        for hook in (*global_forward_hooks.values(), *global_forward_pre_hooks.values()):
            if is_of_user(hook) and _told(hook) not in self._told:
                self._told.add(_told(hook))
                warn_at_user_line(
                    f"{_told(hook)}, a hook of all modules, sees what this rank has of "
                    "activations: the hooks of a module (module.register_forward_hook) are given "
                    "whole ones"
                )

    def _wrap(self, fqn: str, module: nn.Module, kind: str, key: int, hook: Hook) -> None:
        hooks = vars(module)[kind]
        converting = [k for k, each in hooks.items() if _module_of(each).startswith(_CONVERTS)]
        keys = list(hooks)
        is_behind = [keys.index(k) < keys.index(key) for k in converting]
        if kind == _BEHIND and not all(is_behind):
            hooks.move_to_end(key)
        if hasattr(hook, "_vescale_hook"):
            return
        slot: Slot = "given" if any(is_behind) else "before"
        run = {
            _BEFORE: functools.partial(self._before, fqn, slot, hook),
            _BEHIND: functools.partial(self._behind, fqn, hook),
            _BACKWARD: functools.partial(self._backward, fqn, hook),
            _BEFORE_BACKWARD: functools.partial(self._before_backward, fqn, hook),
        }[kind]
        hooks[key] = _named_like(hook, run)

    def _before(self, fqn: str, slot: Slot, hook: Hook, module: nn.Module, *given: Any) -> Any:
        """Call a hook with a module's arguments: without those that have names, or with both."""
        seen = self._seen(fqn, slot, given, hook)
        if seen is None:
            return hook(module, *given)
        result = hook(module, *seen.tree)
        seen.write_back()
        if result is None:
            return None
        with_names = len(given) > 1
        taken = seen.taken(result if with_names else (_as_arguments(result),))
        return taken if with_names else taken[0]

    def _behind(self, fqn: str, hook: Hook, module: nn.Module, *given: Any) -> Any:
        """Call a hook with what a module was given, and what it returns."""
        *arguments, output = given
        before = self._seen(fqn, "given", tuple(arguments), hook)
        seen = self._seen(fqn, "returned", output, hook)
        whole = output if seen is None else seen.tree
        result = hook(module, *(arguments if before is None else before.tree), whole)
        if before is not None:
            before.write_back()
        if seen is None:
            return result
        if result is None:
            return seen.taken(whole) if seen.is_touched else None
        return seen.taken(result)

    def _backward(self, fqn: str, hook: Hook, module: nn.Module, inputs: Any, grads: Any) -> Any:
        seen = self._seen(fqn, "grad_input", inputs, hook)
        outputs = self._seen(fqn, "grad_output", grads, hook)
        result = hook(
            module,
            inputs if seen is None else seen.tree,
            grads if outputs is None else outputs.tree,
        )
        return result if seen is None or result is None else seen.taken(_as_arguments(result))

    def _before_backward(self, fqn: str, hook: Hook, module: nn.Module, grads: Any) -> Any:
        seen = self._seen(fqn, "grad_output", grads, hook)
        if seen is None:
            return hook(module, grads)
        result = hook(module, seen.tree)
        return None if result is None else seen.taken(_as_arguments(result))

    def _seen(self, fqn: str, slot: Slot, tree: Any, hook: Hook) -> Seen | None:
        """Return what a hook sees of a structure; None if it is what is there."""
        leaves, spec = flattened(tree)
        conversions: list[list[Conversion]] = [[] for _ in leaves]
        whole = [*leaves]  # over the axes so far: the next one knows what is over them
        for axis, _ in self._axes:
            found = axis.conversions(fqn, slot, whole)
            for at, conversion in enumerate(found):
                if isinstance(conversion, Unknown):
                    self._tell(fqn, hook, slot, at)
                elif conversion is not None:
                    conversions[at].append(conversion)
                    whole[at] = conversion.to_whole(whole[at])
        if not any(conversions):
            return None
        return Seen(leaves, whole, spec, conversions, f"{_told(hook)}, a hook of {fqn!r},")

    def _tell(self, fqn: str, hook: Hook, slot: Slot, at: int) -> None:
        text = (
            f"{_told(hook)}, a hook of {fqn!r}, sees what this rank has of value {at} among "
            f"{_SEEN[slot]}, which may not be what one device has: how it lies over ranks "
            "could not be found"
        )
        if fqn in self._told:
            return
        if self._at_end is not None:
            self._at_end.setdefault(fqn, text)
            return
        self._told.add(fqn)  # in backward
        warn_at_user_line(text)


_SEEN: dict[Slot, str] = {
    "before": "arguments",
    "given": "arguments",
    "returned": "what is returned",
    "grad_input": "gradients of arguments",
    "grad_output": "gradients of what is returned",
}
_Hooked = tuple[str, nn.Module, str, int, Hook]
_SLOTS: dict[str, tuple[Slot, ...]] = {
    _BEFORE: ("before", "given"),
    _BEHIND: ("given", "returned"),
    _BACKWARD: ("grad_input", "grad_output"),
    _BEFORE_BACKWARD: ("grad_output",),
}


def _hooked(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Hooked]:
    """Yield hooks of users on modules, in an order that ranks share."""
    for fqn, module in modules:
        attributes = vars(module)
        for kind in _KINDS:
            hooks: MutableMapping[int, Hook] = attributes[kind]
            if not hooks or (kind == _BACKWARD and not module._is_full_backward_hook):
                continue
            for key, hook in list(hooks.items()):
                if is_of_user(hook):
                    yield fqn, module, kind, key, hook


def _places(hooked: Iterable[_Hooked]) -> Iterator[tuple[str, str]]:
    """Yield where hooks are, told apart where a module has several, and what they are called."""
    numbers = Counter[tuple[str, str]]()
    for fqn, _, kind, _, hook in hooked:
        numbers[fqn, kind] += 1
        yield f"{fqn!r} in {kind}, number {numbers[fqn, kind]}", _told(hook)


def _named_like(hook: Hook, run: Hook) -> Hook:
    """Return a hook that says of itself what another one does, and runs as it is written."""

    def named(*given: Any) -> Any:
        return run(*given)

    functools.update_wrapper(named, hook, updated=())
    named.__module__ = _module_of(hook)
    made: Any = left_out(named, _LEFT_OUT)
    made._vescale_hook = hook
    return made


def _as_arguments(result: Any) -> Any:
    return result if result is None or isinstance(result, tuple) else (result,)


def _module_of(hook: Any) -> str:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(hook, "__module__", None) or type(hook).__module__


def _told(hook: Any) -> str:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return repr(getattr(hook, "__qualname__", type(hook).__qualname__))
