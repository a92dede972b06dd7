"""The planner's price of collectives agrees with NCCL's own model where bytes decide."""

from __future__ import annotations

import pytest

from benchmarks.collectives import Kind, nccl_seconds, planner_seconds


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
@pytest.mark.parametrize(
    ("ranks", "least"), [(2, 2**26), (4, 2**26), (8, 2**26), (16, 2**28)], ids=str
)
def test_long_messages_take_what_nccl_takes_them_to_take(
    kind: Kind, ranks: int, least: int
) -> None:
    for nbytes in (least, 2**28, 2**30):
        seconds, _ = nccl_seconds(kind, nbytes, ranks)
        assert planner_seconds(kind, nbytes, ranks) == pytest.approx(seconds, rel=0.15)


def test_gathers_over_many_nodes_have_the_latency_of_a_ring() -> None:
    for power in range(16, 31):
        seconds, _ = nccl_seconds("all_gather", 2**power, 512)
        assert planner_seconds("all_gather", 2**power, 512) == pytest.approx(seconds, rel=0.15)
