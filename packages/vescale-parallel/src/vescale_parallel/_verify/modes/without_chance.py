"""Take chance out of a forward that is run to be compared with another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.random_ops import DrawMode

aten = torch.ops.aten


class WithoutChance(DrawMode):
    """Has operators that draw random numbers give constants: dropout keeps everything.

    The number of draws, and so what is drawn for a row, depends on how many rows there are.
    """

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return without_chance(func, args, kwargs)


def without_chance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return constants in place of what an operator would draw."""
    if func is aten.native_dropout.default:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" in names:
        given = dict(zip(names, args, strict=False)) | kwargs | {"dropout_p": 0.0}
        return func(**given)
    if func is aten.randperm.default:
        # Not the identity: rows that are mixed with others must not be taken for rows alone.
        return torch.arange(args[0], dtype=kwargs.get("dtype") or torch.int64).roll(1)
    return pytree.tree_map_only(Tensor, _constant, func(*args, **kwargs))


def _constant(drawn: Tensor) -> Tensor:
    if not drawn.is_floating_point():
        return drawn.fill_(drawn.dtype == torch.bool)
    # A layer is left out, by custom, if a single number is small.
    return drawn.fill_(0.5 if drawn.dim() else 1.0)
