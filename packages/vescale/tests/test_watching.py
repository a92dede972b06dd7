"""Where memory is, and with which module a spike of the loss began."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import vescale
from vescale_dtensor import DTensor
from vescale_parallel import DataParallel
from vescale_planner import RankMemory
from vescale_testing import World


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
    )


def test_categories_add_up_to_what_the_allocator_saw() -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    x_BF = torch.randn(256, 64)

    def step() -> None:
        model(x_BF).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    held = 3 * nbytes  # and a count of steps for each
    activities = [ProfilerActivity.CPU]
    with (
        vescale.memory_report(model, optimizer) as report,
        profile(activities=activities, profile_memory=True) as seen,
    ):
        step()
    total = most = 0
    results: Any = seen.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    assert report.nbytes["parameters"] == nbytes
    assert 2 * nbytes <= report.nbytes["optimizer"] <= 2.01 * nbytes
    assert report.nbytes["activations"] > 0
    assert math.isclose(report.peak, held + most, rel_tol=0.03)


def test_the_report_stands_beside_the_prediction() -> None:
    model = _net()
    predicted = RankMemory(
        parameters=1e6, gradients=2e6, optimizer=3e6, activations=4e6, output=0.0,
        fragmentation=0.0, reserved=0.0,
    )  # fmt: skip
    with vescale.memory_report(model, predicted=predicted) as report:
        model(torch.randn(8, 64)).sum().backward()
    assert "rank 0: " in str(report)
    assert "predicted 4.0 MB" in str(report)
    assert report.nbytes["gradients"] == report.nbytes["parameters"]


def test_a_report_leaves_nothing_behind() -> None:
    model = _net()
    with vescale.memory_report(model):
        model(torch.randn(8, 64))
    assert not any(module._forward_pre_hooks for module in model.modules())


class _Spiking(nn.Module):
    """Two layers, of which the second is made larger in some step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.backward_scale = 1.0, 1.0

    def forward(self, x_BF: Tensor) -> Tensor:
        y_BF = self.second(self.first(x_BF).tanh())
        return (y_BF * self.scale).square().mean()


def _steps(model: _Spiking, watch: vescale.SpikeWatch, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = model(torch.randn(32, 4))
        loss.backward()
        watch.step(loss.detach())


def test_the_module_with_which_a_spike_began_is_named() -> None:
    torch.manual_seed(0)
    model = _Spiking()
    with vescale.detect_spikes(model) as watch:
        _steps(model, watch, 10)
        assert watch.spikes == []
        with torch.no_grad():
            model.second.weight.mul_(20)
        with pytest.warns(UserWarning, match=r"step 10: the loss was .* output of 'second'"):
            _steps(model, watch, 1)
        with torch.no_grad():
            model.second.weight.div_(20)
        _steps(model, watch, 5)
    assert [(spike.step, spike.module, spike.kind) for spike in watch.spikes] == [
        (10, "second", "output")
    ]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_that_is_no_number_is_a_spike() -> None:
    torch.manual_seed(0)
    model = _Spiking()
    with vescale.detect_spikes(model) as watch:
        _steps(model, watch, 6)
        with torch.no_grad():
            model.first.bias.fill_(float("nan"))
        with pytest.warns(UserWarning, match="output of 'first'"):
            _steps(model, watch, 1)


def test_ranges_need_steps() -> None:
    with (
        pytest.raises(ValueError, match=r"at least 5 steps.*got window 2"),
        vescale.detect_spikes(nn.Linear(1, 1), window=2),
    ):
        pass


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.net(x_BF).square().mean()


def _reported(constraints: dict[str, int]) -> tuple[dict[str, int], int, int]:
    model = _WithLoss()
    plan = vescale.ParallelPlan(data_parallel=DataParallel(**constraints))  # pyright: ignore[reportArgumentType]: a stage
    model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)

    def step() -> None:
        model(torch.full((16, 64), vescale.data_parallel_rank(model) + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with vescale.memory_report(model, optimizer) as report:
        step()
    own = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    return report.nbytes, report.peak, 4 * own


def test_shards_and_what_is_gathered_of_them_are_parameters(world2: World) -> None:
    whole = 4 * sum(p.numel() for p in _net().parameters())
    for nbytes, peak, own in world2.run(_reported, {"size": 2, "zero_stage": 3}):
        assert own < 0.6 * whole
        assert own < nbytes["parameters"] <= 1.1 * (own + whole)
        assert 2 * own <= nbytes["optimizer"] <= 2.1 * own
        assert nbytes["communication"] > 0
        assert sum(nbytes.values()) == peak
