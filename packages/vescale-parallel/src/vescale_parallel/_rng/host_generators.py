"""Python's and NumPy's generators in the passes of a pipeline, where one device has them.

Both are the generator that torch has on the CPU, with other ways to make numbers of its words, and
their states can be set. So a forward's draws from them are placed as torch's are, see [Note: draws
of a pipeline]: words are counted between borders, as the run on tensors without values draws them.
Unlike torch's operators these draw as many as values say at times, and normal numbers in pairs of
which one is kept; such draws, and those that come otherwise than they were seen, are refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Words = tuple[int, int]
# What a forward draws at once, at the most, for it to be counted.
_MOST_WORDS = 2**20
_LENGTH = 624
NAMES = ("Python's random", "numpy.random")
_ADVICE = (
    "draw with torch instead, as torch.rand(()).item() does, or draw before the model is called, "
    "or use pipeline_parallel.size 1"
)


@dataclass(frozen=True)
class Place:
    """Where such a generator is.

    Attributes:
        key: Its state.
        index: How many words of it are drawn.
        kept: What else it has, half of a pair of normal numbers for example.
    """

    key: tuple[int, ...]
    index: int
    kept: object

    def after(self, words: int) -> Place:
        """Return where it is when so many words more are drawn."""
        if not words:
            return self
        generator = random.Random()
        generator.setstate((3, (*self.key, self.index), None))
        generator.getrandbits(32 * words)
        _, state, _ = generator.getstate()
        return Place(state[:-1], state[-1], self.kept)

    def words_to(self, other: Place) -> int | None:
        """Return how many words are between two places; None if that is not known."""
        here, words = self, 0
        if here.kept != other.kept:
            return None
        while here.key != other.key or here.index > other.index:
            words += _LENGTH - here.index + 1
            if words > _MOST_WORDS:
                return None
            here = here.after(_LENGTH - here.index + 1)
        return words + other.index - here.index


Places = tuple[Place, Place | None]


def places() -> Places:
    """Return where Python's generator is, and NumPy's; None for that if nothing imported it."""
    _, state, kept = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return Place(state[:-1], state[-1], kept), None
    name, key, index, *rest = numpy.random.get_state()
    own = Place(tuple(key.tolist()), index, (name, *rest))
    return Place(state[:-1], state[-1], kept), own


def set_places(of_python: Place, of_numpy: Place | None) -> None:
    """Put the generators where they shall be."""
    random.setstate((3, (*of_python.key, of_python.index), of_python.kept))  # pyright: ignore[reportArgumentType]
    if of_numpy is not None:
        numpy: Any = sys.modules["numpy"]
        name, *rest = of_numpy.kept  # pyright: ignore[reportGeneralTypeIssues]
        numpy.random.set_state((name, [*of_numpy.key], of_numpy.index, *rest))


def words_between(before: Places, now: Places, where: str) -> Words:
    """Return how many words were drawn of each.

    Raises:
        ValueError: If that is not known.
    """
    return _words(before[0], now[0], 0, where), _words(before[1], now[1], 1, where)


def _words(before: Place | None, now: Place | None, which: int, where: str) -> int:
    if before is None or now is None or before == now:
        return 0
    words = before.words_to(now)
    if words is None:
        raise ValueError(
            f"{where} draws from {NAMES[which]} so that it cannot be told where stages of a "
            f"pipeline find the numbers of one device: normal numbers come in pairs; {_ADVICE}"
        )
    return words


def refuse_unseen(before: Places, where: str) -> None:
    """Raise if something was drawn since then."""
    for name, held, now in zip(NAMES, before, places(), strict=True):
        if held != now:
            raise ValueError(
                f"{where} drew from {name} otherwise than when the model was run on shapes alone, "
                "to see what stages of a pipeline have to draw: they would draw other numbers "
                f"than one device; {_ADVICE}"
            )


class HostStep:
    """The places of both generators in one step of this rank.

    Args:
        moves: Words that a forward draws before each of its borders, and after the last one.
        first: Where the first micro-batch begins.
    """

    def __init__(self, moves: Sequence[Words], first: Places) -> None:
        self._sums = [*zip(*map(accumulate, zip(*moves, strict=True)), strict=True)]
        self._first = first

    @property
    def draws_some(self) -> bool:
        """Whether a forward draws."""
        return any(self._sums[-1])

    def at(self, microbatch: int, border: int) -> Places:
        """Return where they are at a border of a micro-batch's forward; -1 is its begin."""
        words = tuple(
            microbatch * total + (self._sums[border][which] if border >= 0 else 0)
            for which, total in enumerate(self._sums[-1])
        )
        return moved(self._first, words)


def moved(held: Places, words: Sequence[int]) -> Places:
    """Return where both are when so many words more were drawn of each."""
    of_python, of_numpy = held
    return of_python.after(words[0]), None if of_numpy is None else of_numpy.after(words[1])


class HostPass:
    """One pass of a micro-batch through a stage.

    Args:
        step: The places of the step.
        microbatch: Its number among those of this rank.
    """

    def __init__(self, step: HostStep, microbatch: int) -> None:
        self._step, self._microbatch = step, microbatch
        self._expected = step.at(microbatch, -1)
        set_places(*self._expected)

    def comes_to(self, border: int, where: str, *, drew: bool) -> None:
        """Go on from a border; ``drew`` says whether this stage drew what comes before it."""
        expected = self._expected
        if self._step.draws_some:
            expected = self._step.at(self._microbatch, border)
        if drew:
            refuse_unseen(expected, where)
        elif expected is not self._expected:
            set_places(*expected)
        self._expected = expected


def total_words(moves: Sequence[Words]) -> Words:
    """Return what a forward draws of each."""
    of_python, of_numpy = zip(*moves, strict=True)
    return sum(of_python), sum(of_numpy)
