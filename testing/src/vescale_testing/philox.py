"""What CUDA's random kernels draw, computed on the CPU.

Philox4x32-10, and how torch spreads its words over threads and elements; it reproduces published
outputs of GPUs, see packages/vescale-dtensor/tests/random/test_cuda_part.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MASK = 2**32 - 1
_THREADS_PER_BLOCK = 256
# float32 and what is rounded from it; double takes two words.
_UNROLL = {torch.float64: 2}


@dataclass(frozen=True, slots=True)
class PhiloxKernels:
    """Draws as the kernels of a GPU do: ``uniform_``, ``normal_``, ``bernoulli_`` and ``random_``.

    Doubles are known for ``uniform_`` only, integers for ranges below 2**32.

    Attributes:
        num_threads: How many the device holds.
    """

    num_threads: int

    def draw(
        self, method: str, parameters: Sequence[Any], seed: int, offset: int, out: Tensor
    ) -> int:
        """Fill ``out`` in the order of its memory; return the offset afterwards.

        Raises:
            NotImplementedError: If the method is not known for the dtype.
        """
        unroll = _UNROLL.get(out.dtype, 4)
        if method not in _METHODS or (unroll == 2 and method != "uniform_"):
            raise NotImplementedError(f"{method} is not emulated for {out.dtype}")
        if not out.numel():
            return offset
        needed = -(-out.numel() // _THREADS_PER_BLOCK) * _THREADS_PER_BLOCK
        threads = torch.arange(min(self.num_threads, needed))
        num_counters = -(-out.numel() // (len(threads) * unroll))
        rows: list[Tensor] = []
        for counter in range(offset // 4, offset // 4 + num_counters):
            words = philox(counter, threads, seed)
            rows += _doubles(words) if unroll == 2 else _METHODS[method](words)
        values = torch.cat(rows)[: out.numel()]
        dims = sorted(range(out.dim()), key=out.stride, reverse=True)
        shaped = _FINISH[method](values, parameters, out.dtype).view([out.shape[d] for d in dims])
        out.permute(dims).copy_(shaped)
        return offset + 4 * num_counters


def philox(counter: int, subsequence: Tensor, seed: int) -> list[Tensor]:
    """Return the four words of Philox4x32-10 for every subsequence, as int64."""
    low, high = subsequence & _MASK, subsequence >> 32
    c = [torch.full_like(low, counter & _MASK), torch.full_like(low, counter >> 32), low, high]
    key = [seed & _MASK, seed >> 32]
    for _ in range(10):
        high_0, low_0 = _product(c[0], 0xD2511F53)
        high_1, low_1 = _product(c[2], 0xCD9E8D57)
        c = [high_1 ^ c[1] ^ key[0], low_1, high_0 ^ c[3] ^ key[1], low_0]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return c


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two words."""
    low, middle = a * (b & 0xFFFF), a * (b >> 16)
    carried = (low >> 16) + (middle & 0xFFFF)
    return (middle >> 16) + (carried >> 16), (carried & 0xFFFF) << 16 | low & 0xFFFF


def _uniforms(words: list[Tensor]) -> list[Tensor]:
    """Return numbers in (0, 1]."""
    return [((word.double() + 0.5) * 2.0**-32).float() for word in words]


def _doubles(words: list[Tensor]) -> list[Tensor]:
    pairs = ((words[0], words[1]), (words[2], words[3]))
    return [((x ^ (y << 21)).double() + 0.5) * 2.0**-53 for x, y in pairs]


def _normals(words: list[Tensor]) -> list[Tensor]:
    return [*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])]


def _box_muller(x: Tensor, y: Tensor) -> list[Tensor]:
    radius = (-2 * ((x.double() + 0.5) * 2.0**-32).log()).sqrt()
    angle = (y.double() + 0.5) * 2.0**-32 * 2 * math.pi
    return [(radius * angle.sin()).float(), (radius * angle.cos()).float()]


def _scale(values: Tensor, parameters: Sequence[Any], dtype: torch.dtype) -> Tensor:
    low, high = parameters
    scaled = (values * (high - low) + low).to(dtype)
    # The upper end, which rounding may reach, becomes the lower one.
    return torch.where(scaled == high, low, scaled)


def _shift(values: Tensor, parameters: Sequence[Any], dtype: torch.dtype) -> Tensor:
    mean, std = parameters
    return (values * std + mean).to(dtype)


def _below(values: Tensor, parameters: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return (values <= parameters[0]).to(dtype)


def _remainder(values: Tensor, parameters: Sequence[Any], dtype: torch.dtype) -> Tensor:
    low, high = parameters
    return (values % (high - low) + low).to(dtype)


_METHODS = {
    "uniform_": _uniforms,
    "bernoulli_": _uniforms,
    "normal_": _normals,
    "random_": lambda words: words,
}
_FINISH = {
    "uniform_": _scale,
    "bernoulli_": _below,
    "normal_": _shift,
    "random_": _remainder,
}
