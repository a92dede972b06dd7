"""A rank's range of a flat buffer: memory of its own, or a part of what stays gathered."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from vescale_parallel._parameters.flat_layout import FlatShape, flat_layout
from vescale_parallel._parameters.flat_shards import FlatShards
from vescale_parallel._torch_private import num_views

LAYOUT = flat_layout((FlatShape((8, 16)), FlatShape((40,))), 2, 4)
KEPT = FlatShards(
    LAYOUT, 1, torch.float32, torch.float32, torch.device("cpu"), is_kept=True
)  # fmt: skip


def test_a_range_is_a_part_of_what_stays_gathered() -> None:
    shards = replace(KEPT)
    shards.own.fill_(3)
    shards.release_whole()  # has the range, so it stays
    assert shards.whole[1].eq(3).all()
    assert shards.whole[0].eq(0).all()
    assert shards.whole[1].data_ptr() == shards.own.data_ptr()


def test_views_of_what_is_gathered_are_no_views_of_the_range() -> None:
    shards = replace(KEPT)
    own, before = shards.own, num_views(shards.own)
    computing = [shards.whole_of(0, torch.Size((8, 16)), (16, 1)), shards.whole.view(-1)[3:]]
    assert num_views(own) == before
    part = own[4:]
    assert num_views(own) == before + 1
    del part, computing


def test_a_range_keeps_the_memory_that_it_is_in() -> None:
    shards = replace(KEPT)
    own = shards.own
    own.fill_(5)
    del shards
    gc.collect()
    assert own.eq(5).all()


@pytest.mark.parametrize(
    "apart",
    [
        replace(KEPT, is_kept=False),
        replace(KEPT, compute_dtype=torch.bfloat16),
        replace(KEPT, on_host=True),
        replace(KEPT, is_viewed=False),
    ],
    ids=["freed", "bfloat16", "on the host", "filled"],
)
def test_other_ranges_have_memory_of_their_own(apart: FlatShards) -> None:
    apart.own.fill_(3)
    apart.allocate_whole()
    assert apart.whole.untyped_storage().nbytes() == LAYOUT.numel * apart.whole.itemsize
    apart.release_whole()
    assert not apart.whole.untyped_storage().nbytes()
    assert apart.own.eq(3).all()
