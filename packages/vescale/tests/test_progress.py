"""The progress report: numbers that can be checked by hand, and one reader of the loss."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vescale
from vescale import Progress
from vescale_dtensor import Replicate, distribute_tensor
from vescale_parallel import Estimate
from vescale_testing import World

ESTIMATE = Estimate(
    step_seconds=1.0, memory_bytes=0, samples=8, tokens=1000, flops=4e12,
    peak_flops_per_second=1e13, device="h100",
)  # fmt: skip
PLAN = vescale.ParallelPlan(estimate=ESTIMATE)


class Clock:
    """Two seconds go by from one look to the next."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 2.0
        return self._now


class Unread(torch.Tensor):
    """A loss of which every read is an error."""

    def __float__(self) -> float:
        raise AssertionError("read between reports")


class Board:
    """Takes scalars as TensorBoard does."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


class Logged:
    """Takes dicts as Weights & Biases does."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))


def lines_of(progress: Progress, file: io.StringIO, losses: list[Any]) -> list[str]:
    with progress:
        for loss in losses:
            progress.step(loss)
    return file.getvalue().splitlines()


def test_a_line_has_loss_rates_and_the_time_left() -> None:
    file = io.StringIO()
    progress = Progress(PLAN, 6, every=2, file=file, clock=Clock(), peak_flops_per_second=1e13)
    first, second = lines_of(progress, file, [4.0, 3.0, 2.5, 2.0])
    # Two steps in two seconds: 1,000 tokens and 4e12 flops a second, of 1e13.
    assert first.startswith("step 2/6  loss 3  1,000 tokens/s  MFU 40.0%  1 s a step  ")
    assert first.endswith("ETA 0:00:04")
    assert second.startswith("step 4/6  loss 2 ")
    assert second.endswith("ETA 0:00:02")


def test_the_loss_is_read_at_reports_only() -> None:
    file, unread = io.StringIO(), torch.tensor(1.0).as_subclass(Unread)
    progress = Progress(None, 3, every=2, file=file, clock=Clock())
    lines = lines_of(progress, file, [unread, torch.tensor(2.0), torch.tensor(5.0)])
    assert [line.split()[3] for line in lines] == ["2", "5"]  # the last step is reported, too


def test_what_is_assumed_is_not_reported() -> None:
    file = io.StringIO()
    assumed = vescale.generate_plan(torch.nn.Linear(4, 4), world_size=1, cluster="h100")
    (line,) = lines_of(Progress(assumed, 1, file=file, clock=Clock()), file, [1.0])
    assert "tokens/s" not in line
    assert "MFU" not in line


def test_tokens_of_a_step_may_be_told() -> None:
    file = io.StringIO()
    progress = Progress(PLAN, every=2, file=file, clock=Clock())
    progress.step(1.0, tokens=10)
    progress.step(1.0, tokens=30)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("step 2  loss 1  20 tokens/s  ")
    assert "ETA" not in line


def test_writers_get_every_number_in_their_own_way() -> None:
    board, run = Board(), Logged()
    progress = Progress(PLAN, 1, step=0, writers=[board, run], file=io.StringIO(), clock=Clock())
    progress.step(torch.tensor(3.0), lr=0.5)
    ((numbers, step),) = run.logged
    assert step == 1
    assert {k: numbers[k] for k in ("loss", "lr", "seconds_per_step", "tokens_per_second")} == {
        "loss": 3.0, "lr": 0.5, "seconds_per_step": 2.0, "tokens_per_second": 500.0,
    }  # fmt: skip
    assert numbers["samples_per_second"] == 4.0
    assert numbers["memory_gib"] > 0
    assert board.scalars == [(name, value, 1) for name, value in numbers.items()]


def test_a_loader_tells_how_many_steps_there_are_and_a_stream_does_not() -> None:
    def stream() -> Iterator[int]:
        yield 1

    for total, expected in ((range(3), "step 6/6"), (stream(), "step 6 ")):
        file = io.StringIO()
        progress = Progress(None, total, epochs=2, step=5, every=1, file=file, clock=Clock())
        (line,) = lines_of(progress, file, [1.0])
        assert line.startswith(expected)


def test_no_steps_between_reports_are_refused() -> None:
    with pytest.raises(ValueError, match="every to be a positive integer, got 0"):
        Progress(None, every=0)


def _reported() -> tuple[str, int]:
    file, run = io.StringIO(), Logged()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    progress = Progress(PLAN, 1, writers=[run], file=file, clock=Clock())
    norm = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    progress.step(torch.tensor(3.0).as_subclass(torch.Tensor), grad_norm=norm)
    return file.getvalue(), len(run.logged)


def test_rank_0_alone_prints_and_writes(world2: World) -> None:
    (first, logged), nothing = world2.run(_reported)
    assert first.startswith("step 1/1  loss 3  grad_norm 2  ")
    assert logged == 1
    assert nothing == ("", 0)
