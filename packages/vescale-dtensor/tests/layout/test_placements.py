import io
import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import InterleavedShard, RaggedShard, is_sharded


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedShard((), 1, (1,)), "expected consecutive dims"),
        (lambda: RaggedShard((0, 2), 1, (1,)), "expected consecutive dims"),
        (lambda: RaggedShard((1, 0), 1, (1,)), "expected consecutive dims"),
        (lambda: RaggedShard((-1,), 1, (1,)), "expected consecutive dims"),
        (lambda: RaggedShard((0,), 0, (1,)), "granularity of at least 1"),
        (lambda: RaggedShard((0,), 1, (0, 0)), "some positive"),
        (lambda: InterleavedShard(0, 0), "parts >= 1"),
        (lambda: InterleavedShard(0, ()), "the length of each part"),
        (lambda: InterleavedShard(0, (4, 0)), "the length of each part"),
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
    assert InterleavedShard(0, (4, 2, 2)) != InterleavedShard(0, (2, 4, 2))


def test_parts_of_equal_length_are_a_number_of_parts() -> None:
    assert InterleavedShard(0, (4, 4, 4)) == InterleavedShard(0, 3)
    assert InterleavedShard(0, (4, 2, 2)).lengths(8) == (4, 2, 2)
    assert InterleavedShard(0, 2).lengths(8) == (4, 4)


def test_placements_survive_pickle() -> None:
    for placement in (
        RaggedShard((0,), 2, (1, 0)),
        RaggedShard((1, 2), 2, (3,)),
        InterleavedShard(1, 3),
        InterleavedShard(0, (4, 2, 2)),
    ):
        assert pickle.loads(pickle.dumps(placement)) == placement


def test_the_dim_of_several_is_the_first() -> None:
    assert RaggedShard((2,), 1, (1,)).dim == 2
    assert RaggedShard((1, 2), 1, (1,)).dim == 1


def test_what_every_rank_has_whole_is_not_sharded() -> None:
    assert not is_sharded(Replicate())
    assert not is_sharded(Partial())
    assert all(map(is_sharded, (Shard(0), RaggedShard((0,), 1, (1,)), InterleavedShard(0, 2))))


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_the_flat_package_pickled_loads(weights_only: bool) -> None:
    placement, buffer = RaggedShard((0, 1), 5, (2, 0, 3)), io.BytesIO()
    torch.save(placement, buffer, _use_new_zipfile_serialization=False)
    now = b"cvescale_dtensor._layout.placements\n"
    assert now in buffer.getvalue()
    former = buffer.getvalue().replace(now, b"cvescale_dtensor._placements\n")
    assert torch.load(io.BytesIO(former), weights_only=weights_only) == placement
