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
from torch import Generator, Tensor

from ._draws import Fill
from ._runs import Runs, draw_window
from ._window import Window

_THREADS_PER_BLOCK = 256
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
        blocks_needed = -(-numel // _THREADS_PER_BLOCK)
        num_threads = min(self.num_threads, blocks_needed * _THREADS_PER_BLOCK)
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
    """The elements that one call draws, in the order of the memory.

    Args:
        draw_at: Draws them.
        grid: On which threads.
        launches: In which pieces.
    """

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


def cuda_tensor(
    fill: Fill, window: Window, generator: Generator
) -> tuple[PhiloxTensor, Callable[[], Tensor]]:
    """Return what draws elements of ``window``, and the state of the generator in the end.

    Raises:
        NotImplementedError: If torch draws in another way than described here.
    """
    grid = _grid(fill, window.dtype, generator.device)
    is_one_launch = _fits(window.span, window.dtype.itemsize)
    if grid is None or not (is_one_launch or window.is_dense):
        raise NotImplementedError(
            f"how this torch draws {fill.method}{fill.parameters} for {window} on "
            f"{generator.device} is not the way that can be cut; draw the whole"
        )
    state = generator.get_state()
    pieces, end = launches(window.numel, window.dtype.itemsize, grid, int(_offset(state)))
    tensor = PhiloxTensor(_drawing(fill, state, generator.device), grid, pieces)
    return tensor, lambda: _state_at(state, end)


@lru_cache(maxsize=256)
def _grid(fill: Fill, dtype: torch.dtype, device: torch.device) -> Grid | None:
    properties = torch.cuda.get_device_properties(device)
    threads_per_processor = properties.max_threads_per_multi_processor
    blocks_per_processor = threads_per_processor // _THREADS_PER_BLOCK
    num_blocks = properties.multi_processor_count * blocks_per_processor
    state = Generator(device).manual_seed(0).get_state()
    draw_at = _drawing(fill, state, device)
    try:
        return measured_grid(draw_at, num_blocks * _THREADS_PER_BLOCK, dtype, device)
    except (RuntimeError, TypeError):
        return None


def _drawing(fill: Fill, state: Tensor, device: torch.device) -> DrawAt:
    generator = Generator(device)

    def draw_at(offset: int, out: Tensor) -> int:
        generator.set_state(_state_at(state, offset))
        fill(out, generator)
        return int(_offset(generator.get_state()))

    return draw_at


def _offset(state: Tensor) -> Tensor:
    """Return a view of the offset in a state: eight bytes of seed, eight of offset."""
    return state[8:16].view(torch.int64)


def _state_at(state: Tensor, offset: int) -> Tensor:
    state = state.clone()
    _offset(state).fill_(offset)
    return state
