"""How does a mt19937 generator move ahead by any number of draws without drawing?

The words of mt19937 obey a linear recurrence over GF(2) whose characteristic polynomial P has
degree 19937. The words after ``d`` draws are therefore the polynomial ``x^d mod P`` applied to
the words of now. Polynomials are Python integers here, bit ``i`` the coefficient of ``x^i``:
shifts and XORs of 20,000-bit integers are all it takes, because P has 135 terms only.

[Note: cost of a jump] On one core of a 2.x GHz server CPU ``x^d mod P`` takes 1.4 ms for d = 1e6
and 6 ms for d = 1e12, and applying it 1.2 ms whatever the distance. Repeated distances (the same
layer again and again) find their polynomial in a cache.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NUM_WORDS = 624
_SHIFT = 397
_DEGREE = 19937
_TWIST = 0x9908B0DF
_LOW = (1 << _DEGREE) - 1

# Draws whose words the polynomial combines: its own degree, and the words of the result.
SEQUENCE_NUMEL = (_DEGREE // NUM_WORDS + 2) * NUM_WORDS
# Four coefficients at a time index a table of the sixteen XORs of four neighbouring words.
_GROUP = 4
_ROWS_AT_A_TIME = 512


def characteristic_polynomial() -> int:
    """Return P, from the closed form of Matsumoto and Nishimura (1998), section A.4."""

    def times_t(p: int) -> int:
        return (p << NUM_WORDS - 1) ^ (p << _SHIFT - 1)

    q = 1
    for bit in range(31):
        q = times_t(q) ^ (_TWIST >> bit & 1)
    return (q << NUM_WORDS) ^ (q << _SHIFT) ^ (_TWIST >> 31 & 1)


@lru_cache(maxsize=1)
def _reduction_terms() -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the lower exponents of P, and the shifts whose rounds divide by P.

    With P = x^19937 (1 + u), dividing by P is multiplying by the inverse of 1 + u, which is
    (1 + u)(1 + u)^2 (1 + u)^4 ... because (1 + u)^128 is 1 within 19937 terms. Squaring
    over GF(2) doubles exponents, so later factors have ever fewer terms that matter.
    """
    p = characteristic_polynomial()
    exponents = tuple(e for e in range(_DEGREE) if p >> e & 1)
    rounds = tuple(
        tuple((_DEGREE - e) << r for e in exponents if (_DEGREE - e) << r < _DEGREE)
        for r in range(7)
    )
    return exponents, rounds


def _reduce(c: int) -> int:
    """Return ``c mod P`` for a polynomial of degree below 2 * 19937."""
    quotient = c >> _DEGREE
    if not quotient:
        return c
    exponents, rounds = _reduction_terms()
    for shifts in rounds:
        total = quotient
        for shift in shifts:
            total ^= quotient >> shift
        quotient = total
    for exponent in exponents:
        c ^= quotient << exponent
    return c & _LOW


@lru_cache(maxsize=4096)
def power_of_x(exponent: int) -> int:
    """Return ``x^exponent mod P``."""
    result = 1
    for bit in f"{exponent:b}":
        # Squaring over GF(2) puts a zero between neighbouring bits: base two read in base four.
        result = int(f"{result:b}", 4)
        result = _reduce(result << 1 if bit == "1" else result)
    return result


def advance(sequence: Tensor, distance: int) -> Tensor:
    """Return the 624 words that follow ``distance`` draws after the first word of ``sequence``.

    Args:
        sequence: int32, 1D, the words of now and the next 33 blocks of 624, untempered. All of
            them must come out of the recurrence (the words right after seeding do not).
        distance: Number of draws, not negative.
    """
    # A window row per group of coefficients, starting at the table entry of the group.
    table = torch.zeros(1 << _GROUP, SEQUENCE_NUMEL, dtype=torch.int32)
    for entry in range(1, 1 << _GROUP):
        lowest = entry & -entry
        shift = lowest.bit_length() - 1
        table[entry, : SEQUENCE_NUMEL - shift] = sequence[shift:]
        if entry != lowest:
            table[entry] ^= table[entry ^ lowest]
    packed = power_of_x(distance).to_bytes(_DEGREE // 8 + 1, "little")
    coefficients = torch.tensor(list(packed), dtype=torch.int64)
    groups = torch.stack((coefficients & 15, coefficients >> _GROUP), dim=1).flatten()
    starts = groups * SEQUENCE_NUMEL + _GROUP * torch.arange(groups.numel())
    windows = table.view(-1).as_strided((table.numel() - NUM_WORDS + 1, NUM_WORDS), (1, 1))
    total = torch.zeros(_ROWS_AT_A_TIME, NUM_WORDS, dtype=torch.int32)
    for chunk in starts.split(_ROWS_AT_A_TIME):
        total[: len(chunk)] ^= windows.index_select(0, chunk)
    while len(total) > 1:
        half = len(total) // 2
        total = total[:half] ^ total[half:]
    return total[0]


def untempered(word: int) -> int:
    """Return the word of the recurrence that is handed out as ``word``."""
    word ^= word >> 18
    word ^= word << 15 & 0xEFC60000
    # Each round makes seven, or eleven, more bits right.
    found = word
    for _ in range(4):
        found = word ^ (found << 7 & 0x9D2C5680)
    found = word = found & 0xFFFFFFFF
    for _ in range(2):
        found = word ^ found >> 11
    return found
