"""The parts of all ranks put together, and the generator afterwards, against one device."""

import itertools
import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard, RaggedShard, local_boxes, local_shape
from vescale_dtensor.random import Fill, Window, draw_part
from vescale_dtensor.random._draw_shard import draw_boxes

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FILLS = [
    *((Fill("uniform_", (-1.0, 2.5)), dtype) for dtype in _FLOATS),
    *((Fill("normal_", (0.5, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("exponential_", (1.5,)), dtype) for dtype in _FLOATS),
    *((Fill("log_normal_", (0.25, 0.5)), dtype) for dtype in _FLOATS),
    *((Fill("cauchy_", (0.0, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("geometric_", (0.2,)), dtype) for dtype in (*_FLOATS, *_INTS)),
    *((Fill("bernoulli_", (0.3,)), dtype) for dtype in (*_FLOATS, *_INTS, torch.bool)),
    *((Fill("random_", ()), dtype) for dtype in (*_FLOATS, *_INTS, torch.bool)),
    *((Fill("random_", (100,)), dtype) for dtype in (*_FLOATS, *_INTS)),
    *((Fill("random_", (-7, 100)), dtype) for dtype in (*_FLOATS, *_INTS[:-1])),
    *((Fill("random_", (-(1 << 62), 1 << 62)), dtype) for dtype in (torch.int64, torch.float64)),
    *((Fill("random_", (-(1 << 63), None)), dtype) for dtype in (torch.int64, torch.float32)),
    *((Fill("uniform_", (-1.0, 1.0)), dtype) for dtype in (torch.complex64, torch.complex128)),
    *((Fill("normal_", (0.5, 2.0)), dtype) for dtype in (torch.complex64, torch.complex128)),
]
_IDS = [f"{fill.method}{fill.parameters}-{str(dtype)[6:]}" for fill, dtype in _FILLS]
# One of each way to draw.
_WAYS = [
    (Fill("uniform_", (-1.0, 2.5)), torch.float32),
    (Fill("random_", ()), torch.int64),
    (Fill("normal_", (0.5, 2.0)), torch.float32),
    (Fill("normal_", (0.5, 2.0)), torch.bfloat16),
    (Fill("normal_", (0.5, 2.0)), torch.float64),
    (Fill("log_normal_", (0.25, 0.5)), torch.float32),
    (Fill("bernoulli_", (0.3,)), torch.float32),
]
# What a generator did before: nothing, stopped in a block, at the end of one, with a spare.
_PASTS = ((0, 0), (5, 0), (624, 0), (1000, 1))
# Around the sizes at which torch takes another path, or a box begins inside a block.
_SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 1000, 4099)


def _generator(past: tuple[int, int]) -> torch.Generator:
    num_draws, num_normals = past
    generator = torch.Generator().manual_seed(11)
    torch.empty(num_draws, dtype=torch.uint8).random_(generator=generator)
    torch.empty(num_normals).normal_(generator=generator)
    return generator


def _check(
    fill: Fill,
    whole: Tensor,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    past: tuple[int, int] = (5, 1),
    is_small: bool = False,
) -> None:
    """Fill ``whole`` on one device and by parts.

    Args:
        fill: With what.
        whole: Tells the geometry.
        mesh_shape: Ranks along each mesh axis.
        placements: One for each of them.
        past: What the generator did before.
        is_small: Draw only the parts even if drawing all is cheaper.
    """
    generator = _generator(past)
    fill(whole, generator)
    assembled = torch.zeros_like(whole)
    context = (fill, whole.dtype, whole.shape, whole.stride(), placements, past)
    window = Window.of(whole)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        boxes = local_boxes(whole.shape, mesh_shape, coordinate, placements)
        shape = local_shape(whole.shape, mesh_shape, coordinate, placements)
        out = torch.empty(shape, dtype=whole.dtype)
        of_rank = _generator(past)
        if is_small:
            draw_boxes(fill, window, [(held.box, held.of(out)) for held in boxes], of_rank)
        else:
            draw_part(fill, window=window, boxes=boxes, out=out, generator=of_rank)
        for held in boxes:
            assembled[held.box.slices] = held.of(out)
        assert torch.equal(of_rank.get_state(), generator.get_state()), context
    assert torch.equal(assembled.nan_to_num(), whole.nan_to_num()), context


def _is_complex_normal(fill: Fill, dtype: torch.dtype) -> bool:
    """Whether the way goes through real ones, which drawing only the parts begins with."""
    return fill.method == "normal_" and dtype.is_complex


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Ranges beyond what a float can tell apart are what some of these are about.
        warnings.filterwarnings("ignore", message=".*is out of bounds.*")
        yield


@pytest.mark.parametrize(("fill", "dtype"), _FILLS, ids=_IDS)
def test_shards_of_every_method_and_dtype_are_those_of_one_device(fill: Fill, dtype: torch.dtype):
    is_small = not _is_complex_normal(fill, dtype)
    for numel, past in itertools.product(_SIZES, _PASTS):
        _check(
            fill, torch.empty(numel, dtype=dtype), (3,), (Shard(0),), past=past, is_small=is_small
        )
    _check(fill, torch.empty(40_009, dtype=dtype), (3,), (Shard(0),))


@pytest.mark.parametrize(("fill", "dtype"), _FILLS, ids=_IDS)
def test_shards_of_strided_tensors_are_those_of_one_device(fill: Fill, dtype: torch.dtype):
    is_small = not _is_complex_normal(fill, dtype)
    for rows, columns in ((3, 4), (7, 11), (33, 70)):
        transposed = torch.empty(columns, rows, dtype=dtype).t()
        gappy = torch.empty(rows, 2 * columns, dtype=dtype)[:, ::2]
        permuted = torch.empty(3, rows, columns, dtype=dtype).permute(1, 2, 0)
        for whole, dim in itertools.product((transposed, gappy, permuted), (0, 1)):
            _check(fill, whole, (3,), (Shard(dim),), is_small=is_small)
    wide = torch.empty(150, 210, dtype=dtype).t()
    _check(fill, wide, (3,), (Shard(1),))


_PLACEMENTS = [
    ((17, 20), (4,), (Shard(1),)),
    ((5, 20), (8,), (Shard(0),)),  # three ranks hold nothing
    ((64, 33), (2, 3), (Shard(0), Shard(1))),
    ((65, 33), (2, 3), (Shard(0), Shard(0))),
    ((64, 33), (2, 2), (Replicate(), Shard(1))),
    ((24, 18), (2,), (InterleavedShard(0, 3),)),
    ((18, 24), (2, 2), (InterleavedShard(1, 3), Shard(0))),
    ((37, 9), (3,), (RaggedShard((0,), 1, (0, 30, 7)),)),
    ((36, 9), (4,), (RaggedShard((0,), 4, (2, 0, 4, 3)),)),
    ((7, 9), (3,), (RaggedShard((0, 1), 5, (4, 0, 9)),)),
    ((4, 5, 6), (2, 2), (RaggedShard((1, 2), 7, (2, 3)), Shard(0))),
    ((5, 6, 7), (2, 2), (Shard(2), Shard(0))),
    ((), (2,), (Replicate(),)),
    ((), (2,), (RaggedShard((0,), 1, (0, 1)),)),
    ((0, 4), (2,), (Shard(1),)),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), _PLACEMENTS)
@pytest.mark.parametrize(("fill", "dtype"), _WAYS)
def test_every_placement_holds_what_one_device_draws(
    fill: Fill,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
):
    whole = torch.empty(shape, dtype=dtype)
    for past in _PASTS:
        _check(fill, whole, mesh_shape, placements, past=past)
        if math.prod(shape):
            _check(fill, whole, mesh_shape, placements, past=past, is_small=True)


@pytest.mark.parametrize(("fill", "dtype"), _WAYS)
def test_the_local_tensor_may_be_strided(fill: Fill, dtype: torch.dtype):
    expected = torch.empty(200, 100, dtype=dtype)
    fill(expected, _generator((0, 1)))
    (held,) = local_boxes((200, 100), (2, 2), (1, 0), (Shard(0), Shard(1)))
    for out in (
        torch.empty(50, 100, dtype=dtype).t(),
        torch.empty(100, 150, dtype=dtype)[:, ::3],
    ):
        draw_part(
            fill,
            window=Window.of(expected),
            boxes=[held],
            out=out,
            generator=_generator((0, 1)),
        )
        assert torch.equal(out, expected[held.box.slices])


@pytest.mark.parametrize("numel", [10, 100_000])
def test_without_a_generator_the_default_one_draws(numel: int):
    fill = Fill("normal_", (0.0, 1.0))
    before = torch.get_rng_state()
    try:
        torch.manual_seed(3)
        expected = torch.randn(numel)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        out = torch.empty(numel // 2)
        boxes = local_boxes((numel,), (2,), (1,), (Shard(0),))
        draw_part(fill, window=Window.of(expected), boxes=boxes, out=out)
        assert torch.equal(out, expected[numel // 2 :])
        assert torch.equal(torch.get_rng_state(), after)
    finally:
        torch.set_rng_state(before)


def test_calls_in_a_row_stay_in_step_with_one_device():
    alone, of_rank = _generator((3, 0)), _generator((3, 0))
    for step, (fill, dtype) in enumerate(_WAYS * 3):
        whole = torch.empty(3 + 211 * step**2, dtype=dtype)
        fill(whole, alone)
        boxes = local_boxes(whole.shape, (2,), (step % 2,), (Shard(0),))
        out = torch.empty(boxes[0].box.shape, dtype=dtype)
        draw_part(fill, window=Window.of(whole), boxes=boxes, out=out, generator=of_rank)
        assert torch.equal(out, whole[boxes[0].box.slices])
        assert torch.equal(alone.get_state(), of_rank.get_state())


def _row(generator: torch.Generator, num_rows: int, index: int) -> Tensor:
    """Draw one row of a matrix of a million columns."""
    shape = (num_rows, 1 << 20)
    out = torch.empty(1, 1 << 20)
    draw_part(
        Fill("uniform_", (0.0, 1.0)),
        window=Window(shape, (1 << 20, 1), 0, torch.float32),
        boxes=local_boxes(shape, (num_rows,), (index,), (Shard(0),)),
        out=out,
        generator=generator,
    )
    return out


def test_a_row_of_a_matrix_that_fits_nowhere_is_that_of_its_lower_half():
    in_one, in_two = _generator((5, 0)), _generator((5, 0))
    row = _row(in_one, 1 << 20, (1 << 19) + 77)
    _row(in_two, 1 << 19, 3)
    assert torch.equal(_row(in_two, 1 << 19, 77), row)
    assert torch.equal(in_two.get_state(), in_one.get_state())


def test_on_the_meta_device_nothing_is_drawn():
    generator = _generator((5, 0))
    before = generator.get_state()
    out = torch.empty(4, device="meta")
    boxes = local_boxes((8,), (2,), (1,), (Shard(0),))
    window = Window((8,), (1,), 0, torch.float32)
    draw_part(
        Fill("uniform_", (0.0, 1.0)), window=window, boxes=boxes, out=out, generator=generator
    )
    assert torch.equal(generator.get_state(), before)


def test_a_tensor_whose_elements_share_memory_is_refused():
    with pytest.raises(NotImplementedError, match="share memory"):
        draw_part(
            Fill("uniform_", (0.0, 1.0)),
            window=Window((200, 300), (200, 1), 0, torch.float32),
            boxes=(),
            out=torch.empty(0, 300),
        )


def test_a_local_tensor_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="expected a local tensor of"):
        draw_part(
            Fill("uniform_", (0.0, 1.0)),
            window=Window.of(torch.empty(4)),
            boxes=(),
            out=torch.empty(4, dtype=torch.float64),
        )


def test_what_torch_does_not_draw_is_refused_before_the_generator_moves():
    generator = _generator((0, 0))
    before = generator.get_state()
    with pytest.raises(NotImplementedError, match="draw the whole"):
        draw_part(
            Fill("normal_", (0.0, 1.0)),
            window=Window.of(torch.empty(20_000, dtype=torch.int64)),
            boxes=(),
            out=torch.empty(0, dtype=torch.int64),
            generator=generator,
        )
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(("fill", "dtype"), _WAYS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_a_part_of_a_million_elements_is_that_of_one_device(
    fill: Fill, dtype: torch.dtype, placement: Placement
):
    _check(fill, torch.empty(1009, 1003, dtype=dtype), (4,), (placement,))


@pytest.mark.nightly
@pytest.mark.parametrize(("fill", "dtype"), _FILLS, ids=_IDS)
def test_a_part_of_three_million_elements_is_that_of_one_device(fill: Fill, dtype: torch.dtype):
    for whole in (torch.empty(1501, 2003, dtype=dtype), torch.empty(2003, 1501, dtype=dtype).t()):
        _check(fill, whole, (2, 2), (Shard(0), Shard(1)))


@pytest.mark.nightly
@pytest.mark.parametrize(("fill", "dtype"), _WAYS)
@pytest.mark.parametrize("shape", [(3001, 4001), (7, 1_700_003)])
def test_a_part_of_twelve_million_elements_is_that_of_one_device(
    fill: Fill, dtype: torch.dtype, shape: tuple[int, ...]
):
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Shard(1))):
        _check(fill, torch.empty(shape, dtype=dtype), (2, 2), placements)
