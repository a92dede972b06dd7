from __future__ import annotations

from dataclasses import replace

import pytest

from vescale_planner import Cluster


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "cpu"])
def test_presets_are_clusters(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert cluster.intra_bytes_per_second >= cluster.inter_bytes_per_second
    assert cluster.flops_per_second_of(2) >= cluster.flops_per_second_of(4)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h200'.*got 'z9000'"):
        Cluster.preset("z9000")


def test_numbers_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes above 0, got 0"):
        replace(Cluster.preset("cpu"), memory_bytes=0)
    with pytest.raises(ValueError, match="efficiency between 0 and 1, got 2"):
        replace(Cluster.preset("cpu"), efficiency=2)


def test_ranks_of_this_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, four = Cluster.of_this_machine(1), Cluster.of_this_machine(4)
    # A machine with GPUs gives each rank a whole one.
    assert four.memory_bytes in (one.memory_bytes, one.memory_bytes // 4)


def test_groups_wider_than_a_node_use_the_slow_links() -> None:
    cluster = Cluster.preset("h200")
    assert cluster.bytes_per_second(8) == cluster.intra_bytes_per_second
    assert cluster.bytes_per_second(9) == cluster.inter_bytes_per_second
