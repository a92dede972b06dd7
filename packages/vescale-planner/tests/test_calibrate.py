"""What a machine reaches is measured, kept in a file, and planned with."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_planner import Cluster, generate_plan
from vescale_planner._machines import calibrate
from vescale_planner._machines.calibrate import fitted_rate
from vescale_testing import World
from vescale_testing.memory import peak_nbytes


def test_the_speed_of_products_is_fitted_by_their_width() -> None:
    widths = [64, 256, 1024]
    peak, half = fitted_rate(widths, [1e12 * k / (k + 100) for k in widths])
    assert peak == pytest.approx(1e12)
    assert half == pytest.approx(100)
    # Noise may make narrow ones the fastest: no width is below what was seen.
    assert fitted_rate(widths, [3.0, 2.0, 1.0])[0] >= 3.0
    assert fitted_rate(widths, [3.0, 2.0, 1.0])[1] >= 0.0


def test_the_turns_of_others_on_a_shared_processor_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent, runs = [0.0], itertools.count(1)

    def run() -> None:
        spent[0] += 1e-3 if next(runs) % 4 else 5e-3  # every fourth waits for 4 ms

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: spent[0])
        found = calibrate._seconds(run, torch.device("cpu"))
    # A round need not end behind a slow run: of some 50 runs one more or less may be slow.
    assert found == pytest.approx(2e-3, rel=0.05)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_SPAN", 0.0)
    monkeypatch.setattr(calibrate, "_ROWS", 32)


@pytest.mark.usefixtures("few")
def test_one_process_measures_its_machine_and_plans_with_it(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    found = Cluster.calibrate()
    declared = Cluster.of_this_machine(1)
    assert found.memory_bytes == declared.memory_bytes
    assert found.flops_per_second != declared.flops_per_second
    # A block's element-wise operators compute exponentials and write memory that is new.
    assert 0 < found.memory_efficiency < 1
    # torch alone takes over 100 MB; what was multiplied to measure is freed.
    resident = peak_nbytes()
    assert 100e6 < found.reserved_bytes <= resident
    for name in ("mine.yaml", "mine.json"):
        found.to_file(tmp_path / name)
        assert Cluster.from_file(tmp_path / name) == found
    batch = torch.ones(4, 8)
    plan = generate_plan(nn.Linear(8, 8), world_size=2, cluster=found, example_batch=batch)
    assert plan.estimate is not None
    assert plan.estimate.step_seconds > 0
    with pytest.raises(ValueError, match=r"\.json, \.yaml or \.yml"):
        found.to_file(tmp_path / "mine.toml")


def _calibrated() -> tuple[str, int]:
    calibrate._REPEATS = 1  # of this process of the pool; measuring well is not the question
    calibrate._SPAN = 0.0
    return Cluster.calibrate().to_json(), dist.get_world_size()


def test_ranks_agree_on_what_they_measured(world2: World) -> None:
    (one, size), (other, _) = world2.run(_calibrated)
    assert one == other
    found = Cluster.from_json(one)
    assert found.ranks_per_node == size == 2
    assert found.intra_bytes_per_second != Cluster.preset("cpu").intra_bytes_per_second
