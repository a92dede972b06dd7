"""How far the operators of a forward move the host's generator, known without drawing.

The words that an operator draws follow from what it fills, the shape and the strides of it. A sum
of words tells for most; normals that are drawn in pairs leave a spare one in the generator, so
there it matters what came before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor.random import Fill, Point, Window, draws, point_after, words_between
from vescale_parallel._trace.random_ops import drawn_into

# Words of an operator that are counted by drawing them.
_MOST_COUNTED = 1 << 22


@dataclass(frozen=True)
class Filled:
    """What an operator fills, a number for each element."""

    fill: Fill
    window: Window


@dataclass(frozen=True)
class Chosen:
    """What an operator chooses that draws as many numbers whatever the values are.

    Attributes:
        shape: Of the weights; of permutations how long they are.
        dtype: Of the weights; None for permutations.
        num_samples: For each row of weights.
        replacement: Whether the same may be chosen twice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    num_samples: int = 0
    replacement: bool = False


# Numbers of words, and normals that are drawn in pairs, in order.
Moves = tuple[int | Filled, ...]


def drawn_by(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Filled | Chosen, ...] | None:
    """Return what an operator on tensors without values draws from the generator of the CPU.

    Nothing if it draws from another one; None if how much depends on values, or is not known.
    """
    if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
        return ()
    try:
        how, _, out = drawn_into(func, args, kwargs)
    except NotImplementedError:
        chosen = _chosen(func, args, kwargs)
        return None if chosen is None else (chosen,)
    return (Filled(how.fill, Window.of(out)),) if out.numel() else ()


def moves_of(drawn: Filled | Chosen) -> Moves | None:
    """Return how that moves the generator; None if it is not known. No mode must be active."""
    if isinstance(drawn, Chosen):
        words = _counted(drawn)
        return None if words is None else (words,)
    point = Point.of(torch.Generator().get_state())
    found = draws(drawn.fill, drawn.window, point)
    if found is not None and found[0] is None:
        return (drawn,)
    end = point_after(drawn.fill, drawn.window, point)
    return None if end is None else (end.num_draws,)


def in_a_row(parts: Iterable[Moves]) -> Moves:
    """Return what several moves are together."""
    found: list[int | Filled] = []
    for move in (each for part in parts for each in part):
        if isinstance(move, int) and found and isinstance(found[-1], int):
            found[-1] += move
        elif move != 0:
            found.append(move)
    return tuple(found)


def advanced(point: Point, moves: Moves) -> Point:
    """Return where a generator is afterwards."""
    for move in moves:
        if isinstance(move, int):
            point = point.after(move)
        else:
            end = point_after(move.fill, move.window, point)
            assert end is not None
            point = end
    return point


def _chosen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Chosen | None:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    match func._schema.name:
        case "aten::randperm":
            return Chosen((given["n"],))
        case "aten::multinomial":
            weights: Tensor = given["self"]
            replacement = bool(given.get("replacement", False))
            return Chosen(tuple(weights.shape), weights.dtype, given["num_samples"], replacement)
        case _:
            return None


@lru_cache(maxsize=256)
def _counted(chosen: Chosen) -> int | None:
    """Return how many words it draws, by drawing."""
    if math.prod(chosen.shape) > _MOST_COUNTED:
        return None
    generator = torch.Generator()
    before = generator.get_state()
    if chosen.dtype is None:
        torch.randperm(chosen.shape[0], generator=generator)
    else:
        torch.multinomial(
            torch.ones(chosen.shape, dtype=chosen.dtype),
            chosen.num_samples,
            chosen.replacement,
            generator=generator,
        )
    return words_between(before, generator.get_state(), _MOST_COUNTED)
