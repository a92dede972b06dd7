"""Parts of what CUDA draws: against an emulation of torch's kernels, and against a GPU."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import local_boxes, local_shape
from vescale_dtensor.random import Fill, Window, draw_part
from vescale_dtensor.random._philox_shard import (
    Grid,
    Launch,
    PhiloxTensor,
    launches,
    measured_grid,
)
from vescale_testing.philox import PhiloxKernels


class _Device:
    """An emulated GPU, for draws of standard uniform or normal numbers."""

    def __init__(self, num_threads: int, method: str, seed: int = 0) -> None:
        self._kernels = PhiloxKernels(num_threads)
        self._method = method
        self._seed = seed

    def draw_at(self, offset: int, out: Tensor) -> int:
        return self._kernels.draw(self._method, (0.0, 1.0), self._seed, offset, out)


def test_the_emulation_draws_what_gpus_were_seen_to_draw():
    # Printed by torch.rand(4, device="cuda") and torch.randn after seed 0 in many a bug report.
    uniform, normal = _Device(2048 * 80, "uniform_"), _Device(2048 * 80, "normal_")
    out = torch.empty(4)
    offset = uniform.draw_at(0, out)
    torch.testing.assert_close(
        out, torch.tensor([0.3990, 0.5167, 0.0249, 0.9401]), atol=6e-5, rtol=0
    )
    out = torch.empty(3)
    uniform.draw_at(offset, out)
    torch.testing.assert_close(out, torch.tensor([0.9722, 0.7910, 0.4690]), atol=6e-5, rtol=0)
    out = torch.empty(4)
    normal.draw_at(0, out)
    expected = torch.tensor([-0.9247, -0.4253, -2.6438, 0.1452])
    torch.testing.assert_close(out, expected, atol=6e-5, rtol=0)


_DEVICES = [(1024, torch.float32, 4), (512, torch.float64, 2)]


@pytest.mark.parametrize(("num_threads", "dtype", "unroll"), _DEVICES)
def test_the_grid_of_a_device_is_found(num_threads: int, dtype: torch.dtype, unroll: int):
    device = _Device(num_threads, "uniform_")
    grid = measured_grid(device.draw_at, num_threads, dtype, torch.device("cpu"))
    assert grid == Grid(num_threads, unroll)


def test_a_device_that_spreads_elements_otherwise_is_noticed():
    device = _Device(768, "uniform_")
    for num_threads in (512, 1024):
        assert (
            measured_grid(device.draw_at, num_threads, torch.float32, torch.device("cpu")) is None
        )


@pytest.mark.parametrize(("num_threads", "dtype", "unroll"), _DEVICES)
def test_runs_are_those_of_the_whole(num_threads: int, dtype: torch.dtype, unroll: int):
    device = _Device(num_threads, "uniform_", seed=9)
    grid = Grid(num_threads, unroll)
    block = grid.block
    for numel in (1, 255, 1000, block - 1, block, block + 1, 3 * block, 5 * block + 77):
        whole = torch.empty(numel, dtype=dtype)
        end = device.draw_at(20, whole)
        pieces, found_end = launches(numel, dtype.itemsize, grid, 20)
        assert found_end == end
        tensor = PhiloxTensor(device.draw_at, grid, pieces)
        for start, stop in itertools.combinations((0, 1, 700, block, 2 * block + 3, numel), 2):
            start, stop = sorted((min(start, numel), min(stop, numel)))
            part = torch.empty(stop - start, dtype=dtype)
            tensor.draw_run(start, part)
            assert torch.equal(part, whole[start:stop])


def test_a_tensor_of_more_than_2_gib_is_drawn_in_halves_after_one_step():
    grid = Grid(2048 * 108, 4)
    numel = (1 << 30) + 7  # float32: 4 GiB and a little
    found, end = launches(numel, 4, grid, 0)
    lengths = [launch.numel for launch in found]
    assert lengths == [268435457, 268435458, 268435458, 268435458]
    assert [launch.start for launch in found] == [0, *itertools.accumulate(lengths)][:-1]
    assert all(1 + (length - 1) * 4 < 2**31 for length in lengths)
    assert found[0].offset == grid.offset_after(0, numel)
    for one, other in itertools.pairwise(found):
        assert other.offset == grid.offset_after(one.offset, one.numel)
    assert end == grid.offset_after(found[-1].offset, found[-1].numel)


def test_runs_cross_from_launch_to_launch():
    device = _Device(512, "uniform_")
    grid = Grid(512, 4)
    pieces = [Launch(0, 3000, 8), Launch(3000, 5001, 16), Launch(8001, 100, 28)]
    whole = torch.empty(8101)
    for piece in pieces:
        device.draw_at(piece.offset, whole[piece.start : piece.start + piece.numel])
    tensor = PhiloxTensor(device.draw_at, grid, pieces)
    for start, stop in ((0, 8101), (2999, 3001), (100, 8050), (4000, 8000)):
        part = torch.empty(stop - start)
        tensor.draw_run(start, part)
        assert torch.equal(part, whole[start:stop])


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GPU_FILLS = [
    *((Fill("uniform_", (-1.0, 2.5)), dtype) for dtype in _FLOATS),
    *((Fill("normal_", (0.5, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("exponential_", (1.5,)), dtype) for dtype in _FLOATS),
    *((Fill("log_normal_", (0.25, 0.5)), dtype) for dtype in _FLOATS),
    *((Fill("cauchy_", (0.0, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("geometric_", (0.2,)), dtype) for dtype in (*_FLOATS, torch.int64)),
    *((Fill("bernoulli_", (0.3,)), dtype) for dtype in (*_FLOATS, torch.int32, torch.bool)),
    *((Fill("random_", ()), dtype) for dtype in (*_FLOATS, torch.int64, torch.uint8)),
    *((Fill("random_", (-7, 100)), dtype) for dtype in (*_FLOATS, torch.int64)),
    (Fill("random_", (0, 1 << 40)), torch.int64),
    (Fill("normal_", (0.5, 2.0)), torch.complex64),
]


def _check_on_gpu(fill: Fill, whole: Tensor, placement: Placement) -> None:
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    start = torch.cuda.get_rng_state()
    fill(whole, torch.cuda.default_generators[0])
    end = torch.cuda.get_rng_state()
    for rank in range(3):
        torch.cuda.set_rng_state(start)
        boxes = local_boxes(whole.shape, (3,), (rank,), (placement,))
        shape = local_shape(whole.shape, (3,), (rank,), (placement,))
        out = torch.empty(shape, dtype=whole.dtype, device="cuda")
        draw_part(fill, window=Window.of(whole), boxes=boxes, out=out)
        for held in boxes:
            assert torch.equal(held.of(out), whole[held.box.slices])
        assert torch.equal(torch.cuda.get_rng_state(), end)


@pytest.mark.gpu
@pytest.mark.parametrize(("fill", "dtype"), _GPU_FILLS)
def test_shards_on_a_gpu_are_those_of_the_whole(fill: Fill, dtype: torch.dtype):
    for shape in ((3, 5), (700, 301), (1500, 4001)):
        for dim in (0, 1):
            _check_on_gpu(fill, torch.empty(shape, dtype=dtype, device="cuda"), Shard(dim))
            transposed = torch.empty(shape, dtype=dtype, device="cuda").t()
            _check_on_gpu(fill, transposed, Shard(dim))


@pytest.mark.gpu
def test_shards_of_more_than_2_gib_on_a_gpu_are_those_of_the_whole():
    whole = torch.empty(3, (1 << 29) // 3 + 1000, device="cuda")
    for fill in (Fill("normal_", (0.0, 1.0)), Fill("uniform_", (0.0, 1.0))):
        for dim in (0, 1):
            _check_on_gpu(fill, whole, Shard(dim))
