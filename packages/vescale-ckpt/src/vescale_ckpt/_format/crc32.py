"""CRC-32 of blocks whose bytes are written by several ranks.

[Note: partial checksums]
A CRC register is linear over GF(2) once the customary inversions are taken off: the register
of a block is the XOR of the registers of its pieces, each as if all other bytes were zero.
Leading zeros change nothing, and n trailing zero bytes multiply the register by x^(8n) modulo
the polynomial. So every rank folds what it wrote into one word per block, and the words of all
ranks XOR to the block's checksum. Nothing is read back, and a byte that no rank wrote, or two
ranks wrote, shows up as a wrong checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt


def _fastest_crc32() -> Callable[[memoryview | bytes, int], int]:
    """Return zlib's function, or the equal one of zlib-ng, which is ten times as fast."""
    if find_spec("zlib_ng") is not None:
        return import_module("zlib_ng.zlib_ng").crc32
    return zlib.crc32


_crc32 = _fastest_crc32()


def crc32(content: memoryview | bytes, start: int = 0) -> int:
    """Return the CRC-32 of ``content``, or of what ``start`` is the CRC-32 of and ``content``."""
    return _crc32(content, start)


U32 = npt.NDArray[np.uint32]

_INVERTED = 0xFFFFFFFF
_POLYNOMIAL = np.uint32(0xEDB88320)  # bit-reversed, as in zlib
_ONE = np.uint32(0x80000000)  # x^0


def multiply(a: U32, b: U32) -> U32:
    """Return the products of polynomials modulo the CRC polynomial, element by element."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    factor = b.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((a >> np.uint32(bit)) & np.uint32(1), factor, np.uint32(0))
        factor = (factor >> np.uint32(1)) ^ np.where(
            factor & np.uint32(1), _POLYNOMIAL, np.uint32(0)
        )
    return product


def _powers(base: np.uint32, count: int) -> U32:
    """Return base^0 ... base^(count-1); ``count`` is a power of two."""
    powers = np.array([_ONE], np.uint32)
    step = np.array([base], np.uint32)
    while len(powers) < count:
        powers = np.concatenate([powers, multiply(powers, step)])
        step = multiply(step, step)
    return powers


_RADIX = 1 << 11
# x^(8n) for n below the radix, and for multiples of the radix.
_LOW = _powers(np.uint32(0x00800000), _RADIX)
_HIGH = _powers(multiply(_LOW[-1:], _LOW[1:2])[0], _RADIX)
MAX_BLOCK_NBYTES = _RADIX * _RADIX


def append_zeros(registers: U32, nbytes: npt.NDArray[np.int64]) -> U32:
    """Return CRC registers after ``nbytes`` more zero bytes each, below MAX_BLOCK_NBYTES."""
    high = multiply(registers, _HIGH[nbytes // _RADIX])
    return multiply(high, _LOW[nbytes % _RADIX])


def register(piece: memoryview | bytes) -> int:
    """Return the CRC register of ``piece``: linear, without the customary inversions."""
    return _crc32(piece, _INVERTED) ^ _INVERTED


def inversions(nbytes: int) -> int:
    """Return what turns the register of a block of ``nbytes`` into its CRC-32, by XOR."""
    return crc32(bytes(nbytes))


class PartialBlockCrcs:
    """The part that one rank wrote of one file, folded to a register per block.

    See [Note: partial checksums].
    """

    def __init__(
        self,
        nbytes: int,
        block_nbytes: int,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._progress = progress
        self.nbytes = nbytes
        self.block_nbytes = block_nbytes
        self.num_blocks = -(-nbytes // block_nbytes)
        self.written_nbytes = 0
        self._blocks: list[int] = []
        self._registers: list[int] = []
        self._trailing: list[int] = []

    def add(self, offset: int, piece: memoryview) -> None:
        """Take account of bytes written at ``offset`` of the file."""
        self.written_nbytes += len(piece)
        self._progress(len(piece))
        position = 0
        while position < len(piece):
            block, start = divmod(offset + position, self.block_nbytes)
            stop = min(start + len(piece) - position, self.block_nbytes)
            block_end = min(self.block_nbytes, self.nbytes - block * self.block_nbytes)
            part = piece[position : position + stop - start]
            self._blocks.append(block)
            self._registers.append(register(part))
            self._trailing.append(block_end - stop)
            position += stop - start

    def folded(self) -> U32:
        """Return a register for every block of the file, zero where this rank wrote nothing."""
        words = np.zeros(self.num_blocks, np.uint32)
        if self._blocks:
            shifted = append_zeros(
                np.array(self._registers, np.uint32), np.array(self._trailing, np.int64)
            )
            np.bitwise_xor.at(words, np.array(self._blocks, np.int64), shifted)
        return words


def checksums(nbytes: int, block_nbytes: int, registers: U32) -> list[int]:
    """Return the CRC-32 of every block of a file from the registers of all ranks, combined."""
    words = registers ^ np.uint32(inversions(min(block_nbytes, nbytes)))
    if len(words):
        last = nbytes - (len(words) - 1) * block_nbytes
        words[-1] = registers[-1] ^ np.uint32(inversions(last))
    return words.tolist()


def checksums_by_file(
    crcs: Mapping[str, PartialBlockCrcs], registers: U32
) -> dict[str, list[int]]:
    """Return the CRC-32 of every block of every file from the combined registers of all."""
    # Without any file there is nothing to split, and one empty part.
    bounds = np.cumsum([own.num_blocks for own in crcs.values()])[:-1]
    return {
        name: checksums(own.nbytes, own.block_nbytes, words)
        for (name, own), words in zip(crcs.items(), np.split(registers, bounds), strict=False)
    }
