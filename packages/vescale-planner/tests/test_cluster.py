from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vescale_planner import Cluster


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "gb200", "mi300x", "cpu"])
def test_presets_are_clusters(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert cluster.intra_bytes_per_second >= cluster.inter_bytes_per_second
    assert cluster.flops_per_second_of(2) >= cluster.flops_per_second_of(4)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h200'.*got 'z9000'"):
        Cluster.preset("z9000")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes to be a whole number above 0, got 0"),
        ({"ranks_per_node": 2.5}, r"ranks_per_node to be a whole number above 0, got 2\.5"),
        ({"reserved_bytes": -1}, "reserved_bytes of 0 or more, got -1"),
        ({"inter_bytes_per_second": float("nan")}, "inter_bytes_per_second above 0, got nan"),
        ({"intra_latency_seconds": -1e-6}, "intra_latency_seconds of 0 or more, got -1e-06"),
        ({"efficiency": 2}, "efficiency above 0, at most 1, got 2"),
        ({"overlap": -1}, "overlap between 0 and 1, got -1"),
        ({"half_width": -5}, "half_width of 0 or more, got -5"),
        ({"flops_per_second": {}}, r"by element size, \{2: 1e15.*got \{\}"),
        ({"flops_per_second": {4: 0.0}}, r"above 0 by element size.*got \{4: 0\.0\}"),
        ({"flops_per_second": 1e12}, r"by element size.*got 1000000000000\.0"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Cluster.preset("cpu"), **changes)


def test_ranks_of_this_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, four = Cluster.of_this_machine(1), Cluster.of_this_machine(4)
    # A machine with GPUs gives each rank a whole one.
    assert four.memory_bytes in (one.memory_bytes, one.memory_bytes // 4)


def test_ranks_share_the_cards_of_their_node_and_reach_a_part_of_the_links() -> None:
    cluster = replace(Cluster.preset("h200"), link_efficiency=0.5)
    assert cluster.inside_bytes_per_second == 225e9
    assert cluster.outside_bytes_per_second == 25e9
    assert replace(cluster, nics_per_node=2).outside_bytes_per_second == 25e9 / 4


def test_a_cluster_is_read_from_json_and_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    h100 = Cluster.preset("h100")
    assert Cluster.from_json(h100.to_json()) == h100
    written = tmp_path / "mine.yaml"
    written.write_text("preset: h100\nname: mine\ninter_bytes_per_second: 25e9\n")
    assert Cluster.from_file(written) == replace(h100, name="mine", inter_bytes_per_second=25e9)
    (tmp_path / "mine.json").write_text(h100.to_json())
    assert Cluster.from_file(tmp_path / "mine.json") == h100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"an object of Cluster's fields, got \[1\]"),
        ("{", "expected a cluster as JSON"),
        ('{"nics": 2}', "unknown cluster field 'nics'"),
        ('{"name": "x"}', "missing .* give 'preset'"),
        ('{"preset": "h100", "overlap": "all"}', "overlap in JSON to be a number, got 'all'"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_json(text)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.json, \.yaml or \.yml"):
        Cluster.from_file(tmp_path / "mine.toml")
