"""A rank that fails is named by those that waited for it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import all_reduce, announced_failures
from vescale_testing import RankError, World


def _second_rank_fails() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    with announced_failures():
        if dist.get_rank() == 1:
            raise KeyError("lost the data")
        all_reduce(torch.ones(3), group)


def test_a_waiting_rank_names_the_rank_that_failed(world2: World) -> None:
    with pytest.raises(RankError) as caught:
        world2.run(_second_rank_fails)
    assert "PeerError: rank 1 raised KeyError: 'lost the data'" in caught.value.errors[0]
    assert "KeyError: 'lost the data'" in caught.value.errors[1]
