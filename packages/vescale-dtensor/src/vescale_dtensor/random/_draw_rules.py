"""How many words does a random method draw, and for which elements?

torch fills CPU tensors in three ways that allow an answer without drawing:

* One element after the other in the order of the memory, a fixed number of words each: all but
  what follows.
* ``normal_`` on at least 16 contiguous elements: block after block of 16. If that leaves a rest,
  the last 16 elements are a block of their own, whose words come later, see :class:`Tail`.
* Fewer or non-contiguous normals, and ``log_normal_``: one after the other in pairs of four words;
  the generator keeps the second value for the next such call.

MKL's way, see _mkl_seeded.py, leaves the order of the generator's words altogether.

[Note: rules are measured] None of the numbers is taken on trust: the first use of a rule for a
dtype draws a few dozen elements and compares. A torch that does something else is noticed, and has
no rule here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ._mt19937_stream import Point, Stream, draws_between
from ._strided_view import Window

BLOCK = 16
PAIR_NUM_DRAWS = 4

_Method = Literal[
    "uniform_",
    "random_",
    "normal_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
]


@dataclass(frozen=True, slots=True)
class Fill:
    """A random in-place method of a tensor and its parameters."""

    method: _Method
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
    """How a random method draws.

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


def draws(fill: Fill, window: Window, point: Point) -> tuple[Draws | None, Point] | None:
    """Return how ``fill`` draws for the elements of ``window``, and where that leaves ``point``.

    The first value is None for normals that are drawn in pairs; the whole is None if the number
    of draws cannot be known without drawing.
    """
    numel = window.numel
    is_blocks = fill.method == "normal_" and numel >= BLOCK and window.is_contiguous
    if fill.method in ("normal_", "log_normal_") and not is_blocks:
        return (None, _after_pairs(point, numel)) if _draws_pairs(fill, window.dtype) else None
    if not is_blocks:
        words = _words_per_element(fill, window.dtype)
        if words is None:
            return None
        found = Draws(fill, numel * words, words)
        return found, point.after(found.num_draws)
    rule = _block_rule(window.dtype)
    if rule is None:
        return None
    words, tail = rule
    num_elements = numel if numel % BLOCK == 0 else tail.start(numel) + BLOCK
    found = Draws(fill, num_elements * words, words, tail)
    return found, point.after(found.num_draws)


def _after_pairs(point: Point, numel: int) -> Point:
    if numel and point.spare is not None:
        numel -= 1
        point = Point(point.stream, point.num_draws)
    if not numel:
        return point
    end = point.num_draws + PAIR_NUM_DRAWS * -(-numel // 2)
    last_pair = Point(point.stream, end - PAIR_NUM_DRAWS)
    return Point(point.stream, end, last_pair if numel % 2 else None)


def trial(fill: Fill, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Fill ``values``; return the states before and after, None if torch refuses."""
    generator = torch.Generator()
    generator.manual_seed(0)
    torch.empty(1, dtype=torch.uint8).random_(generator=generator)
    before = generator.get_state()
    try:
        fill(values, generator)
    except (RuntimeError, TypeError):
        return None
    return before, generator.get_state()


def drawn_from(fill: Fill, state: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return what ``fill`` draws from ``state`` on."""
    generator = torch.Generator()
    generator.set_state(state)
    values = torch.empty(numel, dtype=dtype)
    fill(values, generator)
    return values


@lru_cache(maxsize=256)
def _words_per_element(fill: Fill, dtype: torch.dtype) -> int | None:
    """Return the words of an element if each has its own, None otherwise."""
    words: set[float] = set()
    values = torch.empty(0)
    before = torch.empty(0)
    for numel in (1, 17, 64):
        values = torch.empty(numel, dtype=dtype)
        states = trial(fill, values)
        if states is None:
            return None
        before, after = states
        words.add(draws_between(before, after) / numel)
    found = words.pop()
    if words or found not in (1, 2, 4):
        return None
    inner = drawn_from(fill, Stream(before).state(19 * int(found)), 23, dtype)
    return int(found) if torch.equal(inner, values[19:42]) else None


@lru_cache(maxsize=256)
def _draws_pairs(fill: Fill, dtype: torch.dtype) -> bool:
    """Whether strided numbers are drawn in pairs that leave a spare."""
    values = torch.empty(2 * BLOCK + 3, 2, dtype=dtype)[:, 0]
    states = trial(fill, values)
    if states is None:
        return False
    before, after = states
    num_pairs = -(-len(values) // 2)
    return (
        draws_between(before, after) == num_pairs * PAIR_NUM_DRAWS
        and Point.of(after).spare is not None
    )


@lru_cache(maxsize=16)
def _block_rule(dtype: torch.dtype) -> tuple[int, Tail] | None:
    """Return the words per element and the tail of block-wise normals, None if neither fits."""
    normal = Fill("normal_", (0.0, 1.0))
    even, odd = torch.empty(4 * BLOCK, dtype=dtype), torch.empty(2 * BLOCK + 5, dtype=dtype)
    even_states, odd_states = trial(normal, even), trial(normal, odd)
    if even_states is None or odd_states is None:
        return None
    words, rest = divmod(draws_between(*even_states), len(even))
    if rest or words not in (1, 2):
        return None
    for tail in Tail:
        if draws_between(*odd_states) == (tail.start(len(odd)) + BLOCK) * words:
            state = Stream(odd_states[0]).state(tail.start(len(odd)) * words)
            last = drawn_from(normal, state, BLOCK, dtype)
            if torch.equal(odd, torch.cat((even[: len(odd) - BLOCK], last))):
                return words, tail
    return None
