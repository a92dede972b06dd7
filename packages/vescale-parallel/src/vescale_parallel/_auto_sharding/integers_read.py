"""Integers of configurations that a module's code reads while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from vescale_parallel._model.code import names_of_class


def integers_read(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield dotted name and value of integers of objects that a module holds, as ``config.heads``.

    Those whose names its class's code has, that of ``__init__`` left out.
    """
    read = names_of_class(type(module))
    for holder, held in vars(module).items():
        if holder not in read or isinstance(held, nn.Module | Tensor | type):
            continue
        for name, value in getattr(held, "__dict__", {}).items():
            if name in read and type(value) is int:
                yield f"{holder}.{name}", value
