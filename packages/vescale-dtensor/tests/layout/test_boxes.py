import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import Box, InterleavedShard, RaggedShard, local_boxes, local_shape
from vescale_dtensor._layout.boxes import Chunks, DimCut, local_shard
from vescale_dtensor._torch_private import StridedShard

Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


def test_chunks_are_those_of_torch() -> None:
    for size, ranks in product(range(9), range(1, 6)):
        chunks = list(torch.arange(size).chunk(ranks)) if size else []
        for rank in range(ranks):
            held = local_boxes((size,), (ranks,), (rank,), (Shard(0),))
            expected = chunks[rank] if rank < len(chunks) else torch.arange(0)
            found = [i for each in held for i in range(size)[each.box.slices[0]]]
            assert found == expected.tolist()


def test_interleaved_parts_are_cut_each_on_its_own() -> None:
    held = local_boxes((12,), (2,), (1,), (InterleavedShard(0, 3),))
    assert [each.box for each in held] == [Box((2,), (2,)), Box((6,), (2,)), Box((10,), (2,))]
    assert [each.local_offset for each in held] == [(0,), (2,), (4,)]


def test_strided_chunks_are_those_of_torch() -> None:
    for size, ranks, split_factor in product(range(1, 14), range(1, 5), range(1, 5)):
        placement = StridedShard(0, split_factor=split_factor)
        shards, _ = placement._split_tensor(torch.arange(size), ranks, with_padding=False)
        for rank, shard in enumerate(shards):
            assert (
                held_values(torch.arange(size), (ranks,), (rank,), (placement,)) == shard.tolist()
            )


def test_an_uneven_interleaved_shard_has_chunks_of_every_part() -> None:
    placement = InterleavedShard(0, 2)
    parts = torch.arange(10).view(2, 5)
    for rank in range(3):
        chunks = torch.cat([part.chunk(3)[rank] for part in parts])
        assert held_values(torch.arange(10), (3,), (rank,), (placement,)) == chunks.tolist()


def held_values(
    full: torch.Tensor,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> list[int]:
    """What a rank has of ``full``, in the order of its local tensor."""
    shape = tuple(full.shape)
    local = full.new_empty(local_shape(shape, mesh_shape, coordinate, placements))
    for held in local_boxes(shape, mesh_shape, coordinate, placements):
        held.of(local).copy_(full[held.box.slices])
    return local.flatten().tolist()


def test_a_flattened_run_is_head_body_and_tail() -> None:
    placement = RaggedShard((0, 1), 1, (3, 15, 7))
    held = local_boxes((5, 5), (3,), (1,), (placement,))
    assert [each.box for each in held] == [
        Box((0, 3), (1, 2)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 3)),
    ]
    assert [each.local_slices for each in held] == [
        (slice(0, 2),),
        (slice(2, 12),),
        (slice(12, 15),),
    ]
    assert local_shape((5, 5), (3,), (1,), (placement,)) == (15,)
    full = torch.arange(25).view(5, 5)
    assert held_values(full, (3,), (1,), (placement,)) == list(range(3, 18))


def test_dims_are_flattened_after_what_an_outer_axis_cut() -> None:
    full = torch.arange(24).view(4, 6)
    placements = (InterleavedShard(1, 2), RaggedShard((0, 1), 2, (3, 5)))
    columns = full.view(4, 2, 3)[:, :, :2].reshape(4, 4)
    assert held_values(full, (2, 2), (0, 1), placements) == columns.flatten()[6:].tolist()


def test_the_last_unit_of_flattened_dims_may_be_shorter() -> None:
    placement = RaggedShard((1, 2), 4, (1, 1, 1))
    sizes = [local_shape((2, 3, 3), (3,), (rank,), (placement,)) for rank in range(3)]
    assert sizes == [(2, 4), (2, 4), (2, 1)]


def test_flattened_dims_cannot_be_cut_apart_again() -> None:
    placements = (RaggedShard((0, 1), 4, (1, 1)), Shard(0))
    with pytest.raises(ValueError, match="an outer mesh axis has flattened"):
        local_boxes((2, 4), (2, 2), (0, 0), placements)


def test_chunks_over_two_axes_are_those_over_one_of_as_many_ranks() -> None:
    for rank in range(6):
        cut = DimCut((0, 1), Chunks((0, 1)))
        found = local_shard((5, 7), (2, 3), (rank // 3, rank % 3), (cut,))
        assert found == local_shard((5, 7), (6,), (rank,), (DimCut((0,), Chunks((0, 1))),))


def test_a_ragged_scalar_is_on_one_rank_only() -> None:
    placement = RaggedShard((0,), 1, (0, 1))
    assert local_boxes((), (2,), (0,), (placement,)) == ()
    assert local_shape((), (2,), (0,), (placement,)) == (0,)
    assert local_boxes((), (2,), (1,), (placement,))[0].box == Box((), ())
    assert local_shape((), (2,), (1,), (placement,)) == ()


def test_two_axes_on_one_dim_nest_outer_to_inner() -> None:
    (held,) = local_boxes((8,), (2, 2), (1, 0), (Shard(0), Shard(0)))
    assert held.box == Box((4,), (2,))


def _ragged_dims(placement: Placement) -> tuple[int, ...]:
    return placement.dims if isinstance(placement, RaggedShard) else ()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A shape, a mesh shape and placements that fit them."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Placement] = []
    apart = set(range(len(shape)))  # dims that no placement has flattened
    for ranks in mesh_shape:
        choices: list[Placement] = [Replicate(), Partial()]
        choices += [Shard(dim) for dim in apart]
        choices += [StridedShard(dim, split_factor=draw(st.integers(1, 3))) for dim in apart]
        choices += [InterleavedShard(dim, 1) for dim in apart]
        units = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(any))
        first = draw(st.integers(0, max(0, len(shape) - 1)))
        dims = tuple(range(first, draw(st.integers(first, max(first, len(shape) - 1))) + 1))
        if (
            not shape
            or apart.issuperset(dims)
            or (len(dims) > 1 and any(dims == _ragged_dims(p) for p in placements))
        ):
            length = math.prod(shape[dim] for dim in dims) if shape else 1
            choices.append(RaggedShard(dims, max(1, -(-length // sum(units))), tuple(units)))
        placements.append(draw(st.sampled_from(choices)))
        if isinstance(placements[-1], RaggedShard) and len(placements[-1].dims) > 1:
            apart.difference_update(placements[-1].dims)
    return shape, mesh_shape, tuple(placements)


@given(layouts())
@settings(max_examples=300)
def test_boxes_of_all_ranks_tile_the_tensor(layout: Layout) -> None:
    shape, mesh_shape, placements = layout
    covered = torch.zeros(shape, dtype=torch.long)
    for coordinate in product(*map(range, mesh_shape)):
        local = torch.zeros(local_shape(shape, mesh_shape, coordinate, placements))
        for held in local_boxes(shape, mesh_shape, coordinate, placements):
            covered[held.box.slices] += 1
            held.of(local).add_(1)
            assert held.of(local).shape == held.box.shape
        assert torch.equal(local, torch.ones_like(local))
    copies = math.prod(
        ranks
        for ranks, p in zip(mesh_shape, placements, strict=True)
        if isinstance(p, Replicate | Partial)
    )
    assert torch.equal(covered, torch.full(shape, copies))


@given(layouts())
@settings(max_examples=100)
def test_a_local_tensor_is_what_each_axis_in_turn_leaves(layout: Layout) -> None:
    shape, mesh_shape, placements = layout
    last = len(mesh_shape) - 1
    if not shape or isinstance(placements[-1], Replicate | Partial):
        return
    dims = getattr(placements[-1], "dims", (getattr(placements[-1], "dim", 0),))
    flattened = any(isinstance(p, RaggedShard) and len(p.dims) > 1 for p in placements[:-1])
    if flattened or len(dims) > 1:
        return
    full = torch.arange(math.prod(shape)).view(shape)
    for coordinate in product(*map(range, mesh_shape)):
        outer = local_shape(shape, mesh_shape[:last], coordinate[:last], placements[:last])
        left = torch.tensor(
            held_values(full, mesh_shape[:last], coordinate[:last], placements[:last]),
            dtype=torch.long,
        ).view(outer)
        assert held_values(full, mesh_shape, coordinate, placements) == held_values(
            left, mesh_shape[last:], coordinate[last:], placements[last:]
        )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_interleaved_boxes_tile_the_tensor(parts: int, ranks: int, chunk: int) -> None:
    size = parts * ranks * chunk
    held = [
        i
        for rank in range(ranks)
        for each in local_boxes((size,), (ranks,), (rank,), (InterleavedShard(0, parts),))
        for i in range(size)[each.box.slices[0]]
    ]
    assert sorted(held) == list(range(size))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_parts_of_any_length_are_chunked_each_on_its_own(lengths: list[int], ranks: int) -> None:
    whole = torch.arange(sum(lengths))
    chunks = [part.chunk(ranks) for part in whole.split(lengths)]
    for rank in range(ranks):
        expected = [part[rank] for part in chunks if rank < len(part)]
        placement = InterleavedShard(0, lengths)
        boxes = local_boxes((len(whole),), (ranks,), (rank,), (placement,))
        assert [b.box.slices[0] for b in boxes] == [
            slice(int(part[0]), int(part[-1]) + 1) for part in expected
        ]
        held = local_shape((len(whole),), (ranks,), (rank,), (placement,))
        assert held == (sum(map(len, expected)),)


def test_intersection_is_what_both_boxes_hold() -> None:
    box = Box((2, 0), (4, 5))
    assert box.intersect(Box((0, 3), (3, 9))) == Box((2, 3), (1, 2))
    assert box.intersect(Box((6, 0), (1, 5))) is None
    assert Box.whole((3, 4)).intersect(box) == Box((2, 0), (1, 4))


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "message"),
    [
        ((4,), (2, 2), (Shard(0),), r"one placement and one coordinate per mesh axis \(2\)"),
        ((4,), (2,), (Shard(1),), "names tensor dim 1"),
        (
            (4,),
            (2,),
            (RaggedShard((0,), 1, (1, 2)),),
            "covers 3 indices, but the",
        ),
        ((4,), (3,), (RaggedShard((0,), 4, (1, 0)),), "units for 2 ranks"),
        ((5,), (2,), (InterleavedShard(0, 2),), "multiple of 2, got 5"),
        ((9,), (2,), (InterleavedShard(0, (4, 2, 2)),), "needs a tensor dim of 8, got 9"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        local_boxes(shape, mesh_shape, (0,) * len(mesh_shape), placements)


def test_an_unknown_placement_is_refused() -> None:
    class Diagonal(Placement):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="unsupported placement"):
        local_boxes((4,), (2,), (0,), (Diagonal(),))
