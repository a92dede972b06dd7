"""Attributes of modules that code outside of them sets before it calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .kept import OF_TORCH, Place


class Attributes:
    """Knows what modules hold in plain attributes, and what has been set there since.

    Tensors and numbers, not what is put into lists and dicts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, dict[str, Any]] = {}
        self.note(model)

    def note(self, module: nn.Module) -> None:
        """Take what a module holds now, behind a call of it, for its own."""
        for each in module.modules():
            self._known[id(each)] = {**vars(each)}

    def set_since(self, module: nn.Module) -> dict[Place, Any]:
        """Return what others have set in a module, and in those within it.

        Not in one that has come since: BigBird replaces its attention in forward.
        """
        return {
            (fqn, name): value
            for fqn, each in module.named_modules()
            if (known := self._known.get(id(each))) is not None
            for name, value in vars(each).items()
            if name not in OF_TORCH
            and isinstance(value, Tensor | int | float)
            and not isinstance(value, nn.Parameter)
            and known.get(name, self) is not value
        }


def put(held: Mapping[Place, Any], module: nn.Module) -> None:
    """Set attributes of a module as its caller does."""
    for (fqn, name), value in held.items():
        vars(module.get_submodule(fqn))[name] = value
