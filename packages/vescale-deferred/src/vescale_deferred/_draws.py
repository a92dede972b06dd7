"""How many words does a random operator draw, and for which elements?

torch fills CPU tensors in two ways that allow an answer without drawing:

* One element after the other in memory order of the iteration, a fixed number of words each:
  ``uniform_`` and ``random_``.
* ``normal_`` on at least 16 contiguous elements: block after block of 16. If that leaves a rest,
  the last 16 elements are a block of their own, whose words come later, see :class:`Tail`.

Fewer or non-contiguous normals are drawn one after the other in pairs of four words; the generator
keeps the second value for the next such call. Every other random operator has to be run to learn
what it draws.

[Note: rules are measured] None of the numbers is taken on trust: the first use of a rule for a
dtype draws a few dozen elements and compares. A torch that does something else is noticed, and its
operator is run instead of counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ._streams import Point, Stream, draws_between
from ._torch_private import OpOverload, schema
from ._window import Window

BLOCK = 16
_SERIAL_PAIR_NUM_DRAWS = 4


@dataclass(frozen=True, slots=True)
class Fill:
    """A random in-place method of a tensor and its parameters."""

    method: Literal["uniform_", "random_", "normal_"]
    parameters: tuple[float | None, ...]

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor`` with what ``generator`` draws."""
        getattr(tensor, self.method)(*self.parameters, generator=generator)


class Tail(Enum):
    """Where ``normal_`` takes the last 16 elements from if their number is no multiple of 16."""

    AFTER_ELEMENTS = "words after one draw for every element"  # float, double
    AFTER_BLOCKS = "words after those of the whole blocks"  # bfloat16, half since torch 2.13

    def start(self, numel: int) -> int:
        """Return how many elements' words come before those of the last 16 elements."""
        return numel if self is Tail.AFTER_ELEMENTS else numel // BLOCK * BLOCK


@dataclass(frozen=True, slots=True)
class Draws:
    """How a random operator draws.

    Attributes:
        fill: What it does.
        num_draws: All words it draws.
        words_per_element: Words for one element, or on average in a block of 16.
        tail: None for one element after the other.
    """

    fill: Fill
    num_draws: int
    words_per_element: int
    tail: Tail | None = None


def fill_of(func: OpOverload, args: tuple[Any, ...]) -> Fill | None:
    """Return the in-place fill that ``func`` amounts to, None if it is none."""
    match schema(func).name, func._overloadname:
        case "aten::uniform_", _:
            return Fill("uniform_", _padded(args[1:], (0.0, 1.0)))
        case (("aten::rand" | "aten::rand_like"), _):
            return Fill("uniform_", (0.0, 1.0))
        case "aten::normal_", _:
            return Fill("normal_", _padded(args[1:], (0.0, 1.0)))
        case (("aten::randn" | "aten::randn_like"), _):
            return Fill("normal_", (0.0, 1.0))
        case "aten::normal", "float_float":
            return Fill("normal_", (args[0], args[1]))
        case "aten::random_", _:
            return Fill("random_", tuple(args[1:]))
        case "aten::randint", ("default" | "generator"):
            return Fill("random_", (0, args[0]))
        case "aten::randint", ("low" | "low_generator"):
            return Fill("random_", (args[0], args[1]))
        case _:
            return None


def draws(fill: Fill, window: Window, point: Point) -> tuple[Draws | None, Point] | None:
    """Return how ``fill`` draws for the elements of ``window``, and where that leaves ``point``.

    The first value is None for normals that are drawn in pairs; the whole is None if the number
    of draws cannot be known without drawing.
    """
    numel = window.numel
    if fill.method != "normal_":
        words = _words_per_element(fill, window.dtype)
        if words is None:
            return None
        found = Draws(fill, numel * words, words)
        return found, point.after(found.num_draws)
    if numel < BLOCK or not window.is_contiguous:
        return (None, _after_pairs(point, numel)) if _draws_pairs(window.dtype) else None
    rule = _block_rule(window.dtype)
    if rule is None:
        return None
    words, tail = rule
    num_elements = numel if numel % BLOCK == 0 else tail.start(numel) + BLOCK
    found = Draws(fill, num_elements * words, words, tail)
    return found, point.after(found.num_draws)


def _padded(given: tuple[Any, ...], defaults: tuple[float, ...]) -> tuple[Any, ...]:
    return (*given, *defaults[len(given) :])


def _after_pairs(point: Point, numel: int) -> Point:
    if numel and point.spare is not None:
        numel -= 1
        point = Point(point.stream, point.num_draws)
    if not numel:
        return point
    end = point.num_draws + _SERIAL_PAIR_NUM_DRAWS * -(-numel // 2)
    last_pair = Point(point.stream, end - _SERIAL_PAIR_NUM_DRAWS)
    return Point(point.stream, end, last_pair if numel % 2 else None)


def _trial(fill: Fill, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Fill ``numel`` elements; return them and the states before and after."""
    generator = torch.Generator()
    generator.manual_seed(0)
    torch.empty(1, dtype=torch.uint8).random_(generator=generator)
    before = generator.get_state()
    values = torch.empty(numel, dtype=dtype)
    try:
        fill(values, generator)
    except (RuntimeError, TypeError):
        return None
    return values, before, generator.get_state()


@lru_cache(maxsize=256)
def _words_per_element(fill: Fill, dtype: torch.dtype) -> int | None:
    words: set[float] = set()
    for numel in (1, 17, 64):
        trial = _trial(fill, dtype, numel)
        if trial is None:
            return None
        words.add(draws_between(*trial[1:]) / numel)
    found = words.pop()
    return int(found) if not words and found in (1, 2) else None


@lru_cache(maxsize=16)
def _draws_pairs(dtype: torch.dtype) -> bool:
    """Whether three normals take two pairs and leave a spare."""
    trial = _trial(Fill("normal_", (0.0, 1.0)), dtype, 3)
    if trial is None:
        return False
    _, before, after = trial
    return (
        draws_between(before, after) == 2 * _SERIAL_PAIR_NUM_DRAWS
        and Point.of(after).spare is not None
    )


@lru_cache(maxsize=16)
def _block_rule(dtype: torch.dtype) -> tuple[int, Tail] | None:
    """Return the words per element and the tail of block-wise normals, None if neither fits."""
    normal = Fill("normal_", (0.0, 1.0))
    numel = 2 * BLOCK + 5
    even, odd = _trial(normal, dtype, 4 * BLOCK), _trial(normal, dtype, numel)
    if even is None or odd is None:
        return None
    words, rest = divmod(draws_between(*even[1:]), 4 * BLOCK)
    if rest or words not in (1, 2):
        return None
    for tail in Tail:
        if draws_between(*odd[1:]) == (tail.start(numel) + BLOCK) * words:
            last = torch.empty(BLOCK, dtype=dtype)
            generator = torch.Generator()
            generator.set_state(Stream(odd[1]).state(tail.start(numel) * words))
            normal(last, generator)
            if torch.equal(odd[0], torch.cat((even[0][: numel - BLOCK], last))):
                return words, tail
    return None
