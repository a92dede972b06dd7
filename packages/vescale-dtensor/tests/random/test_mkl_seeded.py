"""Methods that seed MCG31m1. Which do depends on the CPU, so the kernel here is a fake."""

import itertools

import pytest
import torch
from torch import Generator, Tensor

from vescale_dtensor.random import Fill, Point
from vescale_dtensor.random._mkl_seeded import SeededTensor, SeedRule, measured_rule, seed_rule

_MULTIPLIER, _MODULUS = 1132489760, 2**31 - 1


class _Kernel:
    """Draws a seed of one or two words, then steps MCG31m1, whatever the strides."""

    def __init__(self, num_words: int, num_bits: int, *, is_affine: bool = False) -> None:
        self._num_words = num_words
        self._num_bits = num_bits
        self._increment = int(is_affine)

    def __call__(self, tensor: Tensor, generator: Generator) -> None:
        seed = 0
        for _ in range(self._num_words):
            seed = seed << 32 | _word(generator)
        x = (seed & 2**self._num_bits - 1) % _MODULUS or 1
        values: list[float] = []
        for _ in range(tensor.numel()):
            values.append(x / _MODULUS)
            x = (x * _MULTIPLIER + self._increment) % _MODULUS
        tensor.copy_(torch.tensor(values, dtype=torch.float64).view(tensor.shape))

    def attempt(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        generator = Generator().manual_seed(0)
        before = generator.get_state()
        self(tensor, generator)
        return before, generator.get_state()


def _word(generator: Generator) -> int:
    """Draw one word and return all its 32 bits."""
    before = generator.get_state()
    two_words = torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    generator.set_state(before)
    torch.empty(1, dtype=torch.int32).random_(generator=generator)
    return int(two_words) >> 32 & 2**32 - 1


@pytest.mark.parametrize(("num_words", "num_bits"), [(1, 32), (2, 32), (2, 64)])
def test_parts_are_drawn_with_the_seed_of_their_place(num_words: int, num_bits: int):
    kernel = _Kernel(num_words, num_bits)
    rule = measured_rule(kernel, kernel.attempt, torch.float64)
    assert rule is not None
    assert rule == SeedRule(num_words, num_bits)
    for seed, start in itertools.product((1, 2, 3), (0, 1, 1000, 4000)):
        generator = Generator().manual_seed(seed)
        point = Point.of(generator.get_state())
        whole = torch.empty(5000, dtype=torch.float64)
        kernel(whole, generator)
        part = torch.empty(700, dtype=torch.float64)
        SeededTensor(kernel, rule, point).draw_run(start, part)
        assert torch.equal(part, whole[start : start + 700])
        assert torch.equal(point.after(num_words).state(), generator.get_state())


def test_another_sequence_is_not_taken_for_this_one():
    kernel = _Kernel(1, 32, is_affine=True)
    assert measured_rule(kernel, kernel.attempt, torch.float64) is None


def test_methods_that_draw_for_every_element_are_not_seeded():
    assert seed_rule(Fill("uniform_", (0.0, 1.0)), torch.float32) is None
    assert seed_rule(Fill("random_", ()), torch.int64) is None
