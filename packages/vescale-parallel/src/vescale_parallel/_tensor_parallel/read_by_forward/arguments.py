"""Arguments that have an element for each head, as biases of ALiBi: forward gets a rank's part."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vescale_parallel._tensor_parallel.communicators import Ranks

_SLICE = re.compile(r"Shard\((\d+)\)( of each row)?")


@dataclass(frozen=True)
class ArgumentSlice:
    """How a rank's part lies in an argument that every rank has whole.

    Attributes:
        dim: Of the argument, which is sharded.
        each_row: Whether the dim is made of the rows of a batch, each of which is sharded: of
            shape (rows * heads, ...), as BLOOM's ``alibi``.
    """

    dim: int
    each_row: bool = False

    @property
    def text(self) -> str:
        """What :func:`parse_slice` reads."""
        return f"Shard({self.dim})" + (" of each row" if self.each_row else "")


def parse_slice(pattern: str, text: str) -> ArgumentSlice:
    """Read how an argument is sliced.

    Raises:
        ValueError: With the texts that are understood.
    """
    match = _SLICE.fullmatch(text)
    if match is None:
        raise ValueError(
            "tensor_parallel.sharding_plan: expected 'Shard(d)' or 'Shard(d) of each row', of an "
            f"argument that every rank has whole, for {pattern!r}, got {text!r}"
        )
    return ArgumentSlice(int(match[1]), match[2] is not None)


def slice_arguments(
    modules: Mapping[str, nn.Module],
    slices: Mapping[tuple[str, str], ArgumentSlice],
    ranks: Ranks,
) -> None:
    """Give modules a rank's part of arguments, in every call that has them."""
    for (fqn, argument), part in slices.items():
        if fqn in modules:
            _slice(modules[fqn], argument, part, ranks.rank, ranks.size)


def _slice(module: nn.Module, argument: str, part: ArgumentSlice, rank: int, size: int) -> None:
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(argument) if argument in names else -1

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        is_named = argument in kwargs
        if not is_named and not 0 <= position < len(args):
            return None
        value = kwargs[argument] if is_named else args[position]
        if not isinstance(value, Tensor):
            return None
        rows = _num_rows([*args, *kwargs.values()]) if part.each_row else 1
        own = _part(argument, value, part, rows, rank, size)
        if is_named:
            return args, {**kwargs, argument: own}
        return (*args[:position], own, *args[position + 1 :]), kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _num_rows(given: list[Any]) -> int:
    """Return how many rows the first activation has that a module is called with."""
    return next(x.shape[0] for x in given if isinstance(x, Tensor) and x.is_floating_point())


def _part(
    argument: str, value: Tensor, part: ArgumentSlice, rows: int, rank: int, size: int
) -> Tensor:
    length = value.shape[part.dim] if part.dim < value.dim() else 0
    if not length or length % (rows * size):
        of_rows = f" in each of {rows} rows" if part.each_row else ""
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected dim {part.dim} of {argument!r} to have as "
            f"many elements{of_rows} for each of {size} ranks, got shape {tuple(value.shape)}"
        )
    if value.requires_grad:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {argument!r} to have no gradient, of which "
            "a rank would have that of its part; leave <slice> out"
        )
    own = value.unflatten(part.dim, (rows, size, -1)).select(part.dim + 1, rank)
    return own.flatten(part.dim, part.dim + 1)
