"""Parameters whose dims are not in memory in the order of their indices: as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

import vescale
from vescale_parallel import ParallelPlan, with_constraints
from vescale_testing import World

from .beside_one_device import adamw, batch_of, build, loss_of, train_beside
from .test_hfsdp import HFSDP
from .test_pipeline_schedules import compared, constraints_of
from .training import whole

pytestmark = pytest.mark.slow


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]: an overload of Module.to


def transposed(model: nn.Module) -> None:
    """Have every other matrix lie by columns, as if it were stored as (in, out)."""
    for parameter in [p for p in model.parameters() if p.dim() == 2][::2]:
        parameter.data = parameter.data.t().contiguous().t()


def both(model: nn.Module) -> None:
    channels_last(model)
    transposed(model)


def both_and_written(model: nn.Module) -> None:
    """Have forward clamp its convolutions, too."""
    both(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(_clamp)


def _clamp(module: nn.Module, args: object) -> None:
    with torch.no_grad():
        module.get_parameter("weight").clamp_(-0.1, 0.1)


def channels_last_3d(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last_3d)  # pyright: ignore[reportCallIssue]: as above


def in_bfloat16(model: nn.Module) -> None:
    model.bfloat16()
    both(model)
    model.register_forward_pre_hook(_to_bfloat16)


def _to_bfloat16(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.bfloat16() for tensor in args)


def muon(model: nn.Module) -> Optimizer:
    return Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)


def zero(stage: int, size: int = 2) -> dict[str, Any]:
    return {"data_parallel.size": size, "data_parallel.zero_stage": stage}


def _train(name: str, change: Any, plan: dict[str, Any], options: dict[str, Any]) -> None:
    train_beside(name, plan, change=change, **options)


@pytest.mark.by_day("0")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_have_one_device_s_bits(world2: World, stage: int) -> None:
    world2.run(_train, "conv", both, zero(stage), {})


@pytest.mark.by_day("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_three_ranks_that_accumulate_and_evaluate_have_them(world3: World, stage: int) -> None:
    world3.run(_train, "conv", both, zero(stage, 3), {"passes": 2, "evaluates": True, "steps": 4})


MORE = {
    "llama-zero1": ("llama", transposed, zero(1), {"steps": 3}),
    "gpt2-zero3": ("gpt2", transposed, zero(3), {"steps": 3}),
    "conv3d-zero0": ("conv3d", channels_last_3d, zero(0), {"steps": 3}),
    "conv3d-zero3": ("conv3d", channels_last_3d, zero(3), {"steps": 3}),
    "bfloat16-zero0": ("conv", in_bfloat16, zero(0), {"steps": 3}),
    "bfloat16-zero3": ("conv", in_bfloat16, zero(3), {"steps": 3}),
    "written-zero1": ("conv", both_and_written, zero(1), {"steps": 4}),
    "written-zero3": ("conv", both_and_written, zero(3), {"steps": 4}),
    "host-zero1": ("conv", both, zero(1) | {"data_parallel.offload": "optimizer"}, {"steps": 3}),
    "host-zero3": ("conv", both, zero(3) | {"data_parallel.offload": "parameters"}, {"steps": 3}),
}
BY_DAY = ("written-zero3", "host-zero3", "conv3d-zero3", "bfloat16-zero3")


@pytest.mark.by_day("bfloat16-zero3")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MORE],
)
def test_other_loops_and_places_have_them(world2: World, name: str) -> None:
    world2.run(_train, *MORE[name])


@pytest.mark.by_day("both")
@pytest.mark.parametrize("change", [both, both_and_written])
def test_copies_of_shards_have_them(world4: World, change: Callable[[nn.Module], None]) -> None:
    world4.run(_train, "conv", change, HFSDP, {"steps": 3})
    hybrid = {**HFSDP, "data_parallel.replicate_zero_stage": 0}
    world4.run(_train, "conv", change, hybrid, {"steps": 3})


PIPELINED = {
    "gpt2": (constraints_of("1f1b", 2, 4), torch.float64),  # keeps its matrices as (in, out)
    "llama": (constraints_of("interleaved_1f1b", 2, 4), torch.float32),
}


@pytest.mark.by_day("gpt2")
@pytest.mark.parametrize("name", PIPELINED)
def test_stages_have_them(world2: World, name: str) -> None:
    world2.run(compared, name, *PIPELINED[name], transposed)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_muon_has_the_matrices_of_one_device(world2: World, stage: int) -> None:
    # Products of matrices depend on strides in their last bits.
    options = {"optimizer_fn": muon, "steps": 3}
    world2.run(_train, "llama", transposed, zero(stage), options)


def _step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    pixels, targets = batch_of("conv", step, 4)
    rank = vescale.data_parallel_rank(model)
    loss_of(model, pixels.chunk(2)[rank], targets.chunk(2)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _made(change: Callable[[nn.Module], None], stage: int) -> Any:
    given = build("conv")
    change(given)
    return vescale.parallelize(with_constraints(ParallelPlan(), zero(stage)), given, adamw)


def _resume(path: str) -> None:
    saved, optimizer = _made(both, 3)
    _step(saved, optimizer, 0)
    vescale.save(path, {"model": saved, "optimizer": optimizer})
    _step(saved, optimizer, 1)
    for change, stage in ((both, 1), (both, 0), (lambda model: None, 3)):
        loaded, other = _made(change, stage)
        vescale.load(path, {"model": loaded, "optimizer": other})
        _step(loaded, other, 1)
        for own, expected in zip(loaded.parameters(), saved.parameters(), strict=True):
            if change is both:
                assert torch.equal(whole(own), whole(expected))
            else:  # convolutions of another layout
                torch.testing.assert_close(whole(own), whole(expected), rtol=0, atol=1e-3)


def test_checkpoints_know_nothing_of_layouts(world2: World, tmp_path: Path) -> None:
    world2.run(_resume, str(tmp_path / "checkpoint"))


class _Seen(nn.Module):
    """Keeps the strides that its parameters compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, (1, 3))
        self.point = nn.Conv2d(4, 6, 1)
        self.columns = nn.Parameter(torch.randn(5, 3).t())
        self.apart = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.repeated = nn.Parameter(torch.randn(3, 1).expand(3, 4))
        channels_last(self)
        self.seen: dict[str, tuple[int, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.named_parameters())
        self.seen = {name: parameter.stride() for name, parameter in named.items()}
        return x.sum() * torch.stack([p.square().sum() for p in named.values()]).sum()


def _strides(stage: int) -> None:
    alone = _Seen()
    expected = {name: parameter.stride() for name, parameter in alone.named_parameters()}
    expected |= {"apart": (3, 1), "repeated": (4, 1)}  # memory of their own
    model: Any = vescale.parallelize(with_constraints(ParallelPlan(), zero(stage)), alone)
    model(torch.ones(4, 1)).backward()
    assert model.seen == expected
    averaged: Any = copy.deepcopy(model)
    averaged(torch.ones(4, 1))
    assert averaged.seen == expected
    if stage == 0:
        for name, parameter in model.named_parameters():
            assert parameter.to_local().stride() == expected[name], name
            assert parameter.grad.to_local().stride() == expected[name], name


@pytest.mark.by_day("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_what_computes_has_the_strides_of_one_device(world2: World, stage: int) -> None:
    world2.run(_strides, stage)


class Normalized(nn.Module):
    """Normalizes over the batch what lies in memory otherwise than its dims, and drops of it."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.up, self.norm_1d = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, x_BCHW: Tensor, y_B: Tensor) -> Tensor:
        if self.order == "channels_last":
            x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        x_BFHW = self.drop(self.norm(self.conv(x_BCHW)).relu())
        # Features behind tokens in memory, and as dims.
        x_BFS = self.up(x_BFHW.flatten(2).transpose(1, 2)).transpose(1, 2)
        x_BFS = self.drop(self.norm_1d(x_BFS))
        return nn.functional.cross_entropy(self.head(x_BFS.mean(-1)), y_B)


@pytest.mark.by_day("0-channels_last")
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("stage", [0, 3])
def test_rows_of_all_ranks_are_normalized_in_the_order_that_they_are_in(
    order: str, stage: int
) -> None:
    plan = with_constraints(ParallelPlan(), zero(stage))
    batch = {"x_BCHW": torch.randn(8, 3, 6, 6), "y_B": torch.arange(8) % 2}
    report = vescale.verify(plan, lambda: Normalized(order), batch, steps=2)
    assert report.passed, report
