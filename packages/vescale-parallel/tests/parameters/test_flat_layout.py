"""Where parameters are in a flat buffer: no unit is cut, little is padded, all ranks agree."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import local_boxes, local_shape
from vescale_parallel._parameters.flat_layout import FlatLayout, FlatShape, flat_layout

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=3)
SHAPES = st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=6)


def _layout(
    shapes: list[tuple[list[int], bool]], ranks: int, itemsize: int, block: int = 1
) -> FlatLayout:
    flat = tuple(FlatShape(tuple(sizes), flattened, block) for sizes, flattened in shapes)
    return flat_layout(flat, ranks, itemsize)


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_parameters_follow_one_another_and_ranges_are_aligned(
    shapes: list[tuple[list[int], bool]], ranks: int, itemsize: int
) -> None:
    layout = _layout(shapes, ranks, itemsize)
    assert layout.shard * itemsize % 128 == 0
    end = 0
    for start, shape in zip(layout.starts, layout.shapes, strict=True):
        assert start >= end
        assert start * itemsize % 16 == 0
        end = start + shape.numel
    assert end <= layout.numel


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_ranges_hold_whole_units_and_together_every_element_once(
    shapes: list[tuple[list[int], bool]], ranks: int, itemsize: int
) -> None:
    layout = _layout(shapes, ranks, itemsize)
    for index, (start, shape) in enumerate(zip(layout.starts, layout.shapes, strict=True)):
        held: list[int] = []
        for rank in range(ranks):
            where = layout.in_shard(index, rank, shape.numel)
            assert 0 <= where.start <= where.stop <= layout.shard
            assert (where.stop - where.start) % layout.units[index].numel == 0
            first = rank * layout.shard - start
            held += range(where.start + first, where.stop + first)
        assert held == [*range(shape.numel)]


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 4]), st.sampled_from([2, 6, 7, 64]))
def test_ranges_begin_between_blocks(
    shapes: list[tuple[list[int], bool]], ranks: int, itemsize: int, block: int
) -> None:
    layout = _layout(shapes, ranks, itemsize, block)
    for index, (start, shape) in enumerate(zip(layout.starts, layout.shapes, strict=True)):
        held: list[int] = []
        for rank in range(ranks):
            where = layout.in_shard(index, rank, shape.numel)
            first = where.start + rank * layout.shard - start
            assert where.start == where.stop or first % block == 0
            held += range(first, first + where.stop - where.start)
        assert held == [*range(shape.numel)]


@given(SHAPES, st.integers(2, 9), st.sampled_from([1, 6, 64]))
def test_the_placement_gives_a_rank_what_its_range_has(
    shapes: list[tuple[list[int], bool]], ranks: int, block: int
) -> None:
    layout = _layout(shapes, ranks, 4, block)
    for index, shape in enumerate(layout.shapes):
        placement = layout.placement(index)
        for rank in range(ranks):
            where = layout.in_shard(index, rank, shape.numel)
            local = local_shape(shape.sizes, (ranks,), (rank,), (placement,))
            assert math.prod(local) == where.stop - where.start


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.data(),
    st.integers(2, 4),
    st.integers(2, 4),
)
def test_the_same_elements_are_in_a_range_on_all_tensor_parallel_ranks(
    sizes: list[int], data: st.DataObject, tp_size: int, ranks: int
) -> None:
    dim = data.draw(st.integers(0, len(sizes) - 1))
    parts = [local_shape(sizes, (tp_size,), (rank,), (Shard(dim),)) for rank in range(tp_size)]
    shape = FlatShape(parts[0], is_flattened=len({*parts}) > 1 and dim > 0)
    layout = flat_layout((shape, FlatShape((3, 5))), ranks, 8)
    placements: tuple[Placement, ...] = (Shard(dim), layout.placement(0))
    for tp_rank, part in enumerate(parts):
        numel = math.prod(part)
        held: list[int] = []
        for rank in range(ranks):
            where = layout.in_shard(0, rank, numel)
            local = local_shape(sizes, (tp_size, ranks), (tp_rank, rank), placements)
            assert math.prod(local) == where.stop - where.start
            first = rank * layout.shard - layout.starts[0]
            held += range(where.start + first, where.stop + first)
            boxes = local_boxes(sizes, (tp_size, ranks), (tp_rank, rank), placements)
            assert sum(held.box.numel for held in boxes) == math.prod(local)
        assert held == [*range(numel)]


def test_copies_are_in_one_row() -> None:
    layout = flat_layout((FlatShape((3,)), FlatShape((2, 2))), 1, 4, multiple=6)
    assert layout.shard % 6 == 0
    assert layout.placement(0) == Replicate()


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_stay_whole_where_they_pad_little(ranks: int) -> None:
    layout = flat_layout((FlatShape((512, 64)), FlatShape((64,)), FlatShape((64, 512))), ranks, 4)
    assert [unit.num_dims for unit in layout.units] == [1, 1, 1]


H, F = 8192, 28672
LLAMA_70B = [(H, H), (1024, H), (1024, H), (H, H), (F, H), (F, H), (H, F), (H,), (H,)]
OUTSIDE = [(128256, H), (H,), (128256, H)]
# One layer of DeepSeek-V3 with its 256 experts, and of gpt-oss-120b.
MLA = [(1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512), (7168, 16384)]
EXPERTS = [(256, 4096, 7168), (256, 7168, 2048), (256, 7168), (256,)]
SHARED = [(2048, 7168), (2048, 7168), (7168, 2048), (7168,), (7168,)]
HEADS = [(4096, 2880), (4096,), (512, 2880), (512,), (512, 2880), (512,), (2880, 4096), (2880,)]
ROUTED = [(128, 2880), (128,), (128, 2880, 5760), (128, 5760), (128, 2880, 2880), (128, 2880)]
GPT_OSS = [*HEADS, (64,), *ROUTED, (2880,), (2880,)]


@pytest.mark.parametrize("ranks", [8, 16, 32, 48, 64, 100, 128, 256, 512, 1024])
@pytest.mark.parametrize(("itemsize", "block"), [(2, 1), (4, 1), (4, 256), (2, 2048)])
@pytest.mark.parametrize(
    "sizes",
    [LLAMA_70B, OUTSIDE, MLA + EXPERTS + SHARED, GPT_OSS],
    ids=["Llama 70B", "outside of its blocks", "DeepSeek-V3", "gpt-oss"],
)
def test_padding_of_large_models_is_under_one_percent(
    sizes: list[tuple[int, ...]], itemsize: int, block: int, ranks: int
) -> None:
    shapes = tuple(FlatShape(shape, block=block) for shape in sizes)
    layout = flat_layout(shapes, ranks, itemsize)
    numel = sum(map(math.prod, sizes))
    assert numel <= layout.numel < 1.01 * numel
