"""Methods that take one number from the generator and seed another generator with it.

On Intel's CPUs torch draws ``bernoulli_`` and ``exponential_`` with MKL: the seed is one draw, the
elements come in row-major order from MKL's MCG31m1, x -> 1132489760 x mod (2**31 - 1), one step
each. So the elements from any place on are those of another seed, and torch's own kernel draws
them once its generator is about to hand out that seed.

[Note: rules are measured] in _draw_rules.py holds here too. It matters: which CPUs are meant is
torch's decision, and changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor

from ._draw_rules import Fill, trial
from ._mt19937_stream import Point, draws_between, state_before
from ._strided_runs import Runs, draw_window
from ._strided_view import Window

_MULTIPLIER = 1132489760
_MODULUS = (1 << 31) - 1

_Kernel = Callable[[Tensor, Generator], None]


@dataclass(frozen=True, slots=True)
class SeedRule:
    """How a seed comes out of a generator.

    Attributes:
        num_draws: Words of the seed; the last is the low one.
        num_bits: Low bits of the seed that count.
    """

    num_draws: int
    num_bits: int

    def seed(self, words: list[int]) -> int:
        """Return the state of MCG31m1 after seeding."""
        value = sum(word << 32 * place for place, word in enumerate(reversed(words)))
        return (value & (1 << self.num_bits) - 1) % _MODULUS or 1


class SeededTensor:
    """The elements that one call draws, in row-major order."""

    def __init__(self, kernel: _Kernel, rule: SeedRule, point: Point) -> None:
        self._kernel = kernel
        self._rule = rule
        self._seed = rule.seed(_next_words(point.state(), rule.num_draws))
        self._generator = Generator()

    def draw(self, window: Window, out: Tensor) -> None:
        """Put the elements at ``window``, in drawing order, into ``out``."""
        draw_window(Runs(self.draw_run), window, out)

    def draw_run(self, start: int, out: Tensor) -> None:
        """Draw the elements from ``start`` on into ``out``, contiguous, 1D."""
        seed = self._seed * pow(_MULTIPLIER, start, _MODULUS) % _MODULUS
        words = [0] * (self._rule.num_draws - 1) + [seed]
        self._generator.set_state(state_before(words))
        self._kernel(out, self._generator)


@lru_cache(maxsize=256)
def seed_rule(fill: Fill, dtype: torch.dtype) -> SeedRule | None:
    """Return how ``fill`` seeds MCG31m1, None if it does something else."""
    return measured_rule(fill, lambda values: trial(fill, values), dtype)


def measured_rule(
    kernel: _Kernel,
    attempt: Callable[[Tensor], tuple[Tensor, Tensor] | None],
    dtype: torch.dtype,
) -> SeedRule | None:
    """Return the rule under which parts drawn on their own are those of the whole.

    ``attempt`` fills a tensor with ``kernel`` and returns the states before and after.
    """
    whole, transposed = torch.empty(1500, dtype=dtype), torch.empty(30, 50, dtype=dtype).t()
    one = torch.empty(1, dtype=dtype)
    states = [attempt(values) for values in (one, whole, transposed)]
    counts = {0 if found is None else draws_between(*found) for found in states}
    if counts not in ({1}, {2}) or not torch.equal(transposed.reshape(-1), whole):
        return None
    (num_draws,) = counts
    assert states[1] is not None
    point = Point.of(states[1][0])
    for num_bits in (32, 32 * num_draws):
        rule = SeedRule(num_draws, num_bits)
        if all(_is_part(SeededTensor(kernel, rule, point), whole, at) for at in (0, 1, 777)):
            return rule
    return None


def _is_part(tensor: SeededTensor, whole: Tensor, start: int) -> bool:
    part = torch.empty_like(whole[start:])
    tensor.draw_run(start, part)
    return torch.equal(part, whole[start:])


def _next_words(state: Tensor, num_draws: int) -> list[int]:
    """Return what a generator in ``state`` hands out next."""
    generator = Generator()
    generator.set_state(state)
    value = torch.empty(1, dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    bits = int(value) & (1 << 64) - 1
    return [bits >> 32, bits & (1 << 32) - 1][:num_draws]
