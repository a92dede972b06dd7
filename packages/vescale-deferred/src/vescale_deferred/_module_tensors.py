"""Where does a module keep tensors? Registered under a name, or in plain attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Put ``replace(tensor)`` in the place of tensors in attributes, lists, tuples and dicts."""
    seen: set[int] = set()
    for owner in module.modules():
        attributes = vars(owner)
        for name, value in list(attributes.items()):
            if name not in {"_parameters", "_buffers", "_modules"}:
                replaced = _replaced(value, replace, seen)
                if replaced is not value:
                    attributes[name] = replaced


def _replaced(value: Any, replace: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    """Return ``value`` with its tensors replaced; lists and dicts are changed in place."""
    match value:
        case Tensor():
            return replace(value)
        case dict() | list() if id(value) not in seen:
            seen.add(id(value))  # containers may hold each other
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                new = _replaced(item, replace, seen)
                if new is not item:
                    value[key] = new
        case tuple():
            items = [_replaced(item, replace, seen) for item in value]
            if any(new is not item for new, item in zip(items, value, strict=True)):
                is_named = hasattr(value, "_fields")
                return type(value)(*items) if is_named else type(value)(items)
        case _:
            pass
    return value


def all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all tensors of a module with their first names, "" for those in attributes."""
    found = [(fqn, tensor) for fqn, _, _, tensor in registered(module)]

    def note(tensor: Tensor) -> Tensor:
        found.append(("", tensor))
        return tensor

    replace_unregistered(module, note)
    return found
