import math
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import Box, InterleavedShard, RaggedShard, local_boxes, local_shape


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


def test_a_ragged_scalar_is_on_one_rank_only() -> None:
    placement = RaggedShard((0,), 1, (0, 1))
    assert local_boxes((), (2,), (0,), (placement,)) == ()
    assert local_shape((), (2,), (0,), (placement,)) == (0,)
    assert local_boxes((), (2,), (1,), (placement,))[0].box == Box((), ())
    assert local_shape((), (2,), (1,), (placement,)) == ()


def test_two_axes_on_one_dim_nest_outer_to_inner() -> None:
    (held,) = local_boxes((8,), (2, 2), (1, 0), (Shard(0), Shard(0)))
    assert held.box == Box((4,), (2,))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """A shape, a mesh shape and placements that fit them."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements: list[Placement] = []
    for ranks in mesh_shape:
        choices: list[Placement] = [Replicate()]
        choices += [Shard(dim) for dim in range(len(shape))]
        units = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(any))
        length = shape[0] if shape else 1
        choices.append(RaggedShard((0,), max(1, -(-length // sum(units))), tuple(units)))
        placements.append(draw(st.sampled_from(choices)))
    return shape, mesh_shape, tuple(placements)


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_boxes_of_all_ranks_tile_the_tensor(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh_shape, placements = layout
    covered = torch.zeros(shape, dtype=torch.long)
    for coordinate in product(*map(range, mesh_shape)):
        local = torch.zeros(local_shape(shape, mesh_shape, coordinate, placements))
        for held in local_boxes(shape, mesh_shape, coordinate, placements):
            covered[held.box.slices] += 1
            local[held.local_slices] += 1
        assert torch.equal(local, torch.ones_like(local))
    copies = math.prod(
        ranks for ranks, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)
    )
    assert torch.equal(covered, torch.full(shape, copies))


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
        ((5,), (2,), (InterleavedShard(0, 2),), "multiple of 4, got 5"),
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedShard((1,), 1, (1,)), r"dims=\(0,\)"),
        (lambda: RaggedShard((0,), 0, (1,)), "granularity of at least 1"),
        (lambda: RaggedShard((0,), 1, (0, 0)), "some positive"),
        (lambda: InterleavedShard(0, 0), "parts >= 1"),
    ],
)
def test_a_placement_without_meaning_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_placements_are_equal_and_hash_alike() -> None:
    assert RaggedShard((0,), 2, (1, 0)) == RaggedShard((0,), 2, (1, 0))
    assert RaggedShard((0,), 2, (1, 0)) != RaggedShard((0,), 2, (0, 1))
    assert len({InterleavedShard(0, 3), InterleavedShard(0, 3), InterleavedShard(1, 3)}) == 2


def test_placements_survive_pickle() -> None:
    for placement in (RaggedShard((0,), 2, (1, 0)), InterleavedShard(1, 3)):
        assert pickle.loads(pickle.dumps(placement)) == placement
