"""Lists and dicts that hooks of a program put activations into, and its forward reads.

Ranks have there what hooks on blocks of their own stages put there: a loss that forward makes of
it would lack that of the others, without a word. What the program reads outside of forward, a
picture of activations for example, may be there.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from vescale_parallel._model.copies import hooks_of_users
from vescale_parallel._model.hook_readers import mentions
from vescale_parallel._torch_private import pytree

_CONTAINERS = (list, dict, deque)
_DEPTH = 4


def kept_for_forward(model: nn.Module) -> set[tuple[str, str]]:
    """Return which hooked modules' activations forward can read in a container: FQN and name.

    Of containers that the code of hooks and that of forward's classes can both reach, those that
    hold a tensor with a graph now.
    """
    hooks = [
        (fqn, hook)
        for fqn, module in model.named_modules()
        for hook in hooks_of_users(module)
        if not _is_own(hook)
    ]
    if not hooks:
        return set()
    read = {id(held) for _, held in _reached(_functions_of(model), model.modules())}
    return {
        (fqn, name)
        for fqn, hook in hooks
        for name, held in _reached([hook], ())
        if id(held) in read and _has_graph(held)
    }


def kept_error(fqn: str, name: str) -> str:
    """Return why a pipeline refuses such a hook."""
    return (
        f"a hook of {fqn!r} puts activations into {name!r}, which forward reads: each stage of a "
        "pipeline would find there what its own blocks put there. Return it from the block, add "
        "it up from block to block as an argument, or use pipeline_parallel.size 1"
    )


def _functions_of(model: nn.Module) -> Iterator[FunctionType]:
    for cls in {type(module) for module in model.modules()}:
        for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            for name, value in vars(base).items():
                if isinstance(value, FunctionType) and name != "__init__" and not _is_own(value):
                    yield value


def _is_own(function: Any) -> bool:
    """Whether it is of this package, or torch's."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return str(getattr(function, "__module__", "")).startswith(("torch.", "vescale"))


def _reached(functions: Iterable[Any], owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield containers that functions hold, or find by a name in objects that they hold."""
    owners = [*owners]
    for function in functions:
        names, objects = mentions(function, _DEPTH)
        for held in objects:
            if isinstance(held, _CONTAINERS):
                yield "a variable", held
        for owner in (*objects, *owners):
            for name, held in _attributes(owner):
                if name in names and isinstance(held, _CONTAINERS):
                    yield name, held
                elif name in names and isinstance(held, FunctionType):
                    found = (each for each in mentions(held, _DEPTH)[1])
                    yield from ((name, each) for each in found if isinstance(each, _CONTAINERS))


def _attributes(owner: object) -> list[tuple[str, Any]]:
    if isinstance(owner, type | ModuleType):
        return []
    return [*getattr(owner, "__dict__", {}).items()]


def _has_graph(held: Any) -> bool:
    leaves = pytree.tree_leaves([*held] if isinstance(held, deque) else held)
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)
