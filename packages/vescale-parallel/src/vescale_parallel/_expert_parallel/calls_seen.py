"""What a module is called with, seen as the module that calls it runs on random rows."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.random_copies import random_copy

_ROWS, _LENGTH = 2, 16


def tensors_seen(owner: nn.Module, name: str, widths: Iterable[int]) -> tuple[Tensor, ...]:
    """Return the tensors that a child of a module is called with first; empty if none is seen.

    Args:
        owner: Is run on rows of features alone, in float64, as a copy.
        name: Of the child.
        widths: How wide rows may be.
    """
    copied = random_copy(owner)
    seen = list[tuple[Tensor, ...]]()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        if all(isinstance(value, Tensor) for value in values):
            seen.append(tuple(value.detach() for value in values))

    copied.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    for hidden in widths:
        rows = torch.randn(_ROWS, _LENGTH, hidden, dtype=torch.float64)
        for given in (rows, rows.view(-1, hidden)):
            # Arbitrary modules, of rows of another width or shape.
            with contextlib.suppress(Exception), torch.no_grad():
                copied(given)
                if seen:
                    return seen[0]
    return ()
