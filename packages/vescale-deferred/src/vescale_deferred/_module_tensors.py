"""Where does a module keep tensors? Registered under a name, or in plain attributes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn


def registered(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield each parameter and buffer: its FQN, the dict that holds it, the key, the tensor."""
    for prefix, owner in module.named_modules():
        for holder in (owner._parameters, owner._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, holder, name, tensor


def replace_unregistered(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Put ``replace(tensor)`` in the place of tensors in attributes.

    Those in lists, tuples, dicts and attributes of other objects count, but no modules that are
    kept from being registered: they may be large, and have materialising of their own.
    """
    attributes = _Attributes(replace)
    for owner in module.modules():
        attributes.replace_in(vars(owner), besides={"_parameters", "_buffers", "_modules"})


class _Attributes:
    """Replaces tensors in what objects hold, in place and each once: they may hold each other."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        self._replace = replace
        # Kept, so that no id is used twice.
        self._seen: dict[int, Any] = {}

    def replace_in(self, holder: dict[Any, Any], besides: Container[str] = ()) -> None:
        self._seen[id(holder)] = holder
        todo: list[dict[Any, Any] | list[Any]] = [holder]
        while todo:  # no recursion: objects may form long chains
            container = todo.pop()
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, item in list(items):
                if container is holder and key in besides:
                    continue
                new = self._replaced(item, todo)
                if new is not item:
                    container[key] = new

    def _replaced(self, value: Any, todo: list[dict[Any, Any] | list[Any]]) -> Any:
        """Return what takes the place of ``value``; what it holds in turn is left ``todo``."""
        match value:
            case Tensor():
                return self._replace(value)
            case str() | int() | float() | None | nn.Module():
                pass
            case tuple():
                items = [self._replaced(item, todo) for item in value]
                if any(new is not item for new, item in zip(items, value, strict=True)):
                    is_named = hasattr(value, "_fields")
                    return type(value)(*items) if is_named else type(value)(items)
            case _:
                if isinstance(value, dict | list):
                    self._note(value, todo)
                self._note(_attributes_of(value), todo)
        return value

    def _note(self, found: Any, todo: list[dict[Any, Any] | list[Any]]) -> None:
        if found is not None and id(found) not in self._seen:
            self._seen[id(found)] = found
            todo.append(found)


def _attributes_of(value: object) -> dict[str, Any] | None:
    """Return the dict of the attributes of an object, None if it is none that holds values."""
    if isinstance(value, type | ModuleType | FunctionType):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")  # whatever its class makes of that
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all tensors of a module with their first names, "" for those in attributes."""
    found = [(fqn, tensor) for fqn, _, _, tensor in registered(module)]

    def note(tensor: Tensor) -> Tensor:
        found.append(("", tensor))
        return tensor

    replace_unregistered(module, note)
    return found
