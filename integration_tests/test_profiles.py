"""What people see of a step: ranges in a profile, and bytes by axis in ``explain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_parallel import ParallelExplanation, explain
from vescale_testing import World

WIDTH, ROWS = 8, 8
TP_DP = {"tensor_parallel.size": 2, "data_parallel.size": 2, "data_parallel.zero_stage": 3}
PP: dict[str, Any] = {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 4}
DP = {"data_parallel.size": 2, "data_parallel.zero_stage": 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def parallel(constraints: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model, rows = Net(), torch.randn(ROWS, WIDTH)
    plan = vescale.generate_plan(
        model, constraints, world_size=dist.get_world_size(), cluster="cpu", example_batch=rows
    )
    model, optimizer = vescale.parallelize(
        plan, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    # Other rows on other data-parallel ranks; the axes are in this order.
    rows += dist.get_rank() // plan.tensor_parallel.size % plan.data_parallel.size
    model(rows).backward()  # what is asked and compared once is over
    optimizer.step()
    return model, optimizer, rows


def profiled(constraints: Mapping[str, Any]) -> set[str]:
    """Return the names that a profile of one step has from this project."""
    model, optimizer, rows = parallel(constraints)
    with torch.profiler.profile() as profile:
        model(rows).backward()
        optimizer.step()
    return {e.key for e in profile.key_averages() if e.key.startswith("vescale: ")}


def test_a_profile_names_phases_and_collectives_by_axis(world4: World) -> None:
    for names in world4.run(profiled, TP_DP):
        assert names == {
            "vescale: forward",
            "vescale: backward",
            "vescale: reduce gradients",
            "vescale: optimizer",
            "vescale: all_gather over tp",
            "vescale: all_gather over dp_shard",
            "vescale: wait for all_gather over dp_shard",
            "vescale: all_to_all over dp_shard",
            "vescale: wait for all_to_all over dp_shard",
        }


def test_a_profile_names_stages_and_micro_batches(world2: World) -> None:
    for stage, names in enumerate(world2.run(profiled, PP)):
        for microbatch in range(4):
            for way in ("forward", "backward"):
                assert f"vescale: {way} of stage {stage} micro-batch {microbatch}" in names
        assert f"vescale: send over pp to stage {1 - stage}" in names
        assert f"vescale: receive over pp from stage {1 - stage}" in names
        assert "vescale: pipeline" in names


def ranges_without_a_profiler() -> int:
    model, optimizer, rows = parallel(DP)
    made = 0
    original = torch.profiler.record_function

    class Counted(original):
        def __init__(self, name: str) -> None:
            nonlocal made
            made += name.startswith("vescale")
            super().__init__(name)

    torch.profiler.record_function = Counted
    try:
        model(rows).backward()
        optimizer.step()
        without = made
        with torch.profiler.profile():
            model(rows).backward()
    finally:
        torch.profiler.record_function = original
    assert made > without
    return without


def test_without_a_profiler_no_range_is_made(world2: World) -> None:
    assert world2.run(ranges_without_a_profiler) == [0, 0]


def explained(constraints: Mapping[str, Any]) -> ParallelExplanation:
    model, _, rows = parallel(constraints)
    with explain(model) as found:
        model(rows).backward()
    return found


def test_explain_counts_what_a_pipeline_sends(world2: World) -> None:
    first, last = (
        {(a.axis, a.what): (a.calls, a.nbytes) for a in found.axes}
        for found in world2.run(explained, PP)
    )
    # Four micro-batches of two rows, float32.
    activations = 4 * (ROWS // 4) * WIDTH * 4
    assert first[("pp", "send activations")] == (4, activations)
    assert last[("pp", "send gradients")] == (4, activations)
    assert ("pp", "send gradients") not in first


def test_explain_counts_what_data_parallelism_sends(world2: World) -> None:
    for found in world2.run(explained, DP):
        axes = {(a.axis, a.what): (a.calls, a.nbytes) for a in found.axes}
        # A gather and a reduce-scatter (an all-to-all, summed in rank order) of every block:
        # the half that this rank owns of 2 x 8 x 16 elements, and nothing besides.
        half = 4 * WIDTH * 16
        assert axes[("dp_shard", "all_to_all")] == (2, 2 * half)
        assert axes[("dp_shard", "all_gather")][1] >= 2 * half
        assert sum(a.nbytes for a in found.axes) == found.counted.nbytes
        assert "dp_shard  all_to_all" in str(found)
