"""Which elements does a CUDA kernel of torch draw from which part of Philox?

torch draws element ``i`` of a tensor in thread ``i mod T``, T being the number of threads that
fill the device, or fewer for a small tensor. Each thread is a Philox subsequence of its own, and
makes ``unroll`` elements of every counter. So T * unroll elements in a row, a *block*, come from
one counter, and the block at another counter is drawn by torch's own kernel with the offset of
the generator moved. The kernel is the same, on as many threads, so the bits are.

T depends on the device: a part is that of the whole on a device of the same kind.

[Note: 32-bit launches] A tensor of more than 2**31 bytes is drawn in several launches: the
generator moves on as for one launch, then halves are halved until they fit, and each draws like a
tensor of its own.

None of this is taken on trust: the first use of a method for a dtype draws a few blocks both ways
and compares. Yet no machine with a GPU has run it so far; what ran is an emulation of the kernels
that reproduces published outputs, see tests/random/test_cuda_part.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._cuda_kernels import THREADS_PER_BLOCK, CudaKernels
from ._draw_rules import Fill
from ._strided_runs import Runs, draw_window
from ._strided_view import Window, memory_order

_OFFSET_PER_COUNTER = 4
_LARGEST_INT = (1 << 31) - 1
_BLOCKS_AT_A_TIME = 16

# Fills a contiguous tensor as torch does at an offset, and returns the offset afterwards.
DrawAt = Callable[[int, Tensor], int]


@dataclass(frozen=True, slots=True)
class Grid:
    """How a kernel spreads elements over threads.

    Attributes:
        num_threads: Of the largest launch.
        unroll: Elements that a thread makes of one counter.
    """

    num_threads: int
    unroll: int

    @property
    def block(self) -> int:
        """Elements that come from one counter."""
        return self.num_threads * self.unroll

    def offset_after(self, offset: int, numel: int) -> int:
        """Return where drawing ``numel`` elements in one launch leaves the generator."""
        if not numel:
            return offset
        blocks_needed = -(-numel // THREADS_PER_BLOCK)
        num_threads = min(self.num_threads, blocks_needed * THREADS_PER_BLOCK)
        num_counters = -(-numel // (num_threads * self.unroll))
        return offset + num_counters * _OFFSET_PER_COUNTER


@dataclass(frozen=True, slots=True)
class Launch:
    """Elements that one kernel draws, and the offset of the generator it begins at."""

    start: int
    numel: int
    offset: int


def launches(numel: int, itemsize: int, grid: Grid, offset: int) -> tuple[list[Launch], int]:
    """Return what draws ``numel`` elements, see [Note: 32-bit launches], and the last offset."""
    end = grid.offset_after(offset, numel)
    if _fits(numel, itemsize):
        return [Launch(0, numel, offset)], end
    found: list[Launch] = []
    pending = [(0, numel)]
    while pending:
        start, length = pending.pop()
        if _fits(length, itemsize):
            found.append(Launch(start, length, end))
            end = grid.offset_after(end, length)
        else:
            half = length // 2
            pending += [(start + half, length - half), (start, half)]
    return found, end


def _fits(numel: int, itemsize: int) -> bool:
    return 1 + (numel - 1) * itemsize <= _LARGEST_INT


class PhiloxTensor:
    """The elements that one call draws, in the order of the memory."""

    def __init__(self, draw_at: DrawAt, grid: Grid, launches: list[Launch]) -> None:
        self._draw_at = draw_at
        self._grid = grid
        self._launches = launches

    def draw(self, window: Window, out: Tensor) -> None:
        """Put the elements at ``window``, in drawing order, into ``out``."""
        # A run costs a launch and a whole block, however short it is.
        numel = _BLOCKS_AT_A_TIME * self._grid.block
        runs = Runs(self.draw_run, gap_numel=numel, scratch_numel=numel)
        draw_window(runs, window, out)

    def draw_run(self, start: int, out: Tensor) -> None:
        """Draw the elements from ``start`` on into ``out``, contiguous, 1D."""
        for launch in self._launches:
            low = max(start, launch.start)
            high = min(start + len(out), launch.start + launch.numel)
            if low < high:
                self._draw_in(launch, low - launch.start, out[low - start : high - start])

    def _draw_in(self, launch: Launch, start: int, out: Tensor) -> None:
        block = self._grid.block
        if launch.numel <= block:
            whole = torch.empty(launch.numel, dtype=out.dtype, device=out.device)
            self._draw_at(launch.offset, whole)
            out.copy_(whole[start : start + len(out)])
            return
        done = 0
        while done < len(out):
            counter, skipped = divmod(start + done, block)
            num_whole = 0 if skipped else (len(out) - done) // block
            # A launch of fewer elements would have fewer threads.
            length = max(num_whole, 1) * block
            direct = num_whole > 0
            target = out[done : done + length]
            drawn = target if direct else torch.empty(length, dtype=out.dtype, device=out.device)
            self._draw_at(launch.offset + counter * _OFFSET_PER_COUNTER, drawn)
            if not direct:
                target = out[done : done + block - skipped]
                target.copy_(drawn[skipped : skipped + len(target)])
            done += len(target)


def measured_grid(
    draw_at: DrawAt, num_threads: int, dtype: torch.dtype, device: torch.device
) -> Grid | None:
    """Return how ``draw_at`` spreads elements, None if parts are not those of the whole."""
    num_counters = draw_at(0, torch.empty(2 * num_threads + 1, dtype=dtype, device=device)) // 4
    unroll = {1: 4, 2: 2}.get(num_counters)
    if unroll is None:
        return None
    grid = Grid(num_threads, unroll)
    whole = torch.empty(2 * grid.block + 5, dtype=dtype, device=device)
    if draw_at(0, whole) != grid.offset_after(0, len(whole)):
        return None
    tensor = PhiloxTensor(draw_at, grid, [Launch(0, len(whole), 0)])
    part = torch.empty_like(whole[7:])
    tensor.draw_run(7, part)
    return grid if torch.equal(part, whole[7:]) else None


@dataclass(frozen=True, slots=True, eq=False)
class PhiloxDraws:
    """What one call of a random method draws on a CUDA device.

    Attributes:
        fill: What is drawn.
        kernels: By which.
        state: Of the generator, before.
        end: Of the generator, afterwards.
        grid: How the kernels spread elements over threads.
        strides: How far apart in drawing order neighbours along each dim are.
        tensor: The elements.
    """

    fill: Fill
    kernels: CudaKernels
    state: Tensor
    end: Tensor
    grid: Grid
    strides: tuple[int, ...]
    tensor: PhiloxTensor

    def draw(self, window: Window, out: Tensor) -> None:
        """Put the elements at ``window``, in drawing order, into ``out``."""
        self.tensor.draw(window, out)

    def draw_whole(self, out: Tensor) -> None:
        """Draw all elements into ``out``, which has the geometry of the call."""
        self.kernels.draw(self.fill, self.state, out)


def philox_draws(
    fill: Fill, window: Window, state: Tensor, kernels: CudaKernels
) -> PhiloxDraws | None:
    """Return what ``fill`` draws for ``window``; None if parts cannot be drawn without the whole.

    ``state`` is that of the generator, from the ``kernels`` of the device where it is drawn.

    Raises:
        NotImplementedError: If elements of ``window`` share memory.
    """
    is_one_launch = _fits(window.span, window.dtype.itemsize)
    if window.dtype.is_complex or not (is_one_launch or window.is_dense):
        return None
    grid = _grid(fill, window.dtype, kernels)
    if grid is None:
        return None
    strides = memory_order(window)
    offset = int(_offset(state))
    pieces, end = launches(window.numel, window.dtype.itemsize, grid, offset)
    return PhiloxDraws(
        fill,
        kernels,
        state,
        _state_at(state, end),
        grid,
        strides,
        PhiloxTensor(_drawing(fill, state, kernels), grid, pieces),
    )


@lru_cache(maxsize=1024)
def _grid(fill: Fill, dtype: torch.dtype, kernels: CudaKernels) -> Grid | None:
    draw_at = _drawing(fill, torch.zeros(16, dtype=torch.uint8), kernels)
    try:
        return measured_grid(draw_at, kernels.num_threads, dtype, kernels.device)
    except (RuntimeError, TypeError):
        return None


def _drawing(fill: Fill, state: Tensor, kernels: CudaKernels) -> DrawAt:
    def draw_at(offset: int, out: Tensor) -> int:
        return int(_offset(kernels.draw(fill, _state_at(state, offset), out)))

    return draw_at


def _offset(state: Tensor) -> Tensor:
    """Return a view of the offset in a state: eight bytes of seed, eight of offset."""
    return state[8:16].view(torch.int64)


def _state_at(state: Tensor, offset: int) -> Tensor:
    state = state.clone()
    _offset(state).fill_(offset)
    return state
