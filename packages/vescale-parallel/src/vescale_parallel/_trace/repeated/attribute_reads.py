"""Attributes that differ between equal blocks, such as a layer's number: who reads them?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

# Told of the instance, of the name, and whether the attribute is read or written.
Hear = Callable[..., None]
_PLAIN = (bool, int, float, str, type(None))
# A class, and the name of an attribute of its instances.
Attribute = tuple[type, str]


def varying_attributes(blocks: Sequence[nn.Module]) -> frozenset[Attribute]:
    """Return the plain attributes that differ between modules at the same place of blocks.

    Reads of others cannot be heard: of what torch's own modules have, and of what a class has
    besides its instances.
    """
    seen: dict[tuple[str, type, str], set[tuple[type, object]]] = {}
    for block in blocks:
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, _PLAIN):
                    place = path, type(module), name
                    seen.setdefault(place, set()).add((type(value), value))
    return frozenset(
        (cls, name)
        for (_, cls, name), values in seen.items()
        if len(values) > 1 and not cls.__module__.startswith("torch.") and not hasattr(cls, name)
    )


@contextlib.contextmanager
def heard_reads(attributes: Iterable[Attribute], hear: Hear) -> Iterator[None]:
    """Tell ``hear`` of every use of these attributes of any instance within this."""
    put: list[Attribute] = []
    try:
        for cls, name in attributes:
            setattr(cls, name, _Heard(name, hear))
            put.append((cls, name))
        yield
    finally:
        for cls, name in put:
            delattr(cls, name)


class _Heard:
    """An attribute of a class that tells who uses that of its instances, and leaves it there."""

    def __init__(self, name: str, hear: Hear) -> None:
        self._name, self._hear = name, hear

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is None or self._name not in vars(instance):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        self._hear(instance, self._name, is_read=True)
        return vars(instance)[self._name]

    def __set__(self, instance: nn.Module, value: object) -> None:
        self._hear(instance, self._name, is_read=False)
        vars(instance)[self._name] = value

    def __delete__(self, instance: nn.Module) -> None:
        self._hear(instance, self._name, is_read=False)
        del vars(instance)[self._name]
