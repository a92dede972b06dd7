"""Ordered collectives against sums written out."""

import torch
import torch.distributed as dist

from vescale_dtensor import all_gather, all_reduce, reduce_scatter
from vescale_testing import World


def _values(dtype: torch.dtype) -> list[torch.Tensor]:
    """What every rank holds; magnitudes differ, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(0)
    scales = (1.0, 1e4, 1e-4, 1e2)
    return [torch.randn(37, generator=generator).mul(s).to(dtype) for s in scales]


def _check_all_reduce() -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        values = _values(dtype)
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        total = values[0].to(wide)
        for value in values[1:]:
            total = total + value
        found = all_reduce(values[dist.get_rank()], group)
        assert found.dtype == dtype
        assert torch.equal(found, total.to(dtype))


def test_all_reduce_adds_in_rank_order(world4: World) -> None:
    world4.run(_check_all_reduce)


def _check_reduce_scatter() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    rows = torch.arange(4.0).view(4, 1) * 10 + rank
    # Row r of every rank: 10 r + (0 + 1 + 2 + 3).
    assert reduce_scatter(rows, group).tolist() == [40.0 * rank + 6]


def test_reduce_scatter_sums_the_rows_meant_for_a_rank(world4: World) -> None:
    world4.run(_check_reduce_scatter)


def _check_all_gather() -> None:
    group = dist.group.WORLD
    assert group is not None
    mine = torch.full((2, 3), float(dist.get_rank()))
    assert torch.equal(all_gather(mine, group)[:, 1, 2], torch.arange(4.0))


def test_all_gather_stacks_in_rank_order(world4: World) -> None:
    world4.run(_check_all_gather)


def test_sums_of_a_scalar_and_of_nothing_keep_their_shape(world2: World) -> None:
    assert world2.run(_reduced_shapes) == [[(), (0,), (3, 1)]] * 2


def _reduced_shapes() -> list[tuple[int, ...]]:
    group = dist.group.WORLD
    assert group is not None
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 1)]
    return [tuple(all_reduce(torch.ones(shape), group).shape) for shape in shapes]
