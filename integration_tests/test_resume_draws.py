"""Within an epoch, what a resumed run draws is what the run that went on drew: to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import vescale
from vescale_ckpt import RngState
from vescale_parallel import with_constraints
from vescale_testing import World

COUNT, ROWS = 24, 4
STOP, END = 2, 9  # in the middle of the first epoch, and of the second


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(8.0) + index)


class Noisy(Rows):
    """Draws an augmentation of each sample."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(8)


class Stream(IterableDataset[Tensor]):
    """Shuffled by torch's generator, as it is when an epoch begins."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([Rows()[index] for index in torch.randperm(COUNT).tolist()])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.inner(x).relu(), 0.5, self.training)
        return (self.outer(hidden) - x).square().mean()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


PLANNED: dict[str, Any] = {"batch.global_size": ROWS}
SHUFFLED: dict[str, Any] = {**PLANNED, "batch.shuffle": True}
DATA: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "planned": (PLANNED, Rows),
    "planned shuffled": (SHUFFLED, Rows),
    "planned noisy": (SHUFFLED, Noisy),
    "stream": (PLANNED, Stream),
    "ready": ({}, lambda: DataLoader(Rows(), batch_size=ROWS)),
    "ready shuffled": ({}, lambda: DataLoader(Rows(), batch_size=ROWS, shuffle=True)),
    "ready generator": (
        {}, lambda: DataLoader(Rows(), batch_size=ROWS, shuffle=True, generator=seeded())
    ),
    "ready noisy": ({}, lambda: DataLoader(Noisy(), batch_size=ROWS, shuffle=True)),
    "ready stream": ({}, lambda: DataLoader(Stream(), batch_size=ROWS)),
}  # fmt: skip
WORKERS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "planned": ({**SHUFFLED, "batch.num_workers": 1}, Rows),
    "planned stream": ({**PLANNED, "batch.num_workers": 1}, Stream),
    "ready": ({}, lambda: DataLoader(Rows(), batch_size=ROWS, shuffle=True, num_workers=1)),
    "ready, living on": (
        {},
        lambda: DataLoader(
            Rows(), batch_size=ROWS, shuffle=True, num_workers=1, persistent_workers=True
        ),
    ),
}


def start(constraints: dict[str, Any], data: Callable[[], Any]) -> dict[str, Any]:
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model, optimizer, loader = vescale.parallelize(
        plan, Dropping(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), dataset=data()
    )
    return {"model": model, "optimizer": optimizer, "loader": loader}


def train(state: dict[str, Any], steps: range, at_stop: Callable[[], None]) -> list[float]:
    """Take the optimizer steps of a range; save, or not, before the one numbered ``STOP``."""
    losses: list[float] = []
    batches = iter(state["loader"])
    for step in steps:
        if step == STOP:
            at_stop()
        batch = next(batches, None)
        if batch is None:
            batches = iter(state["loader"])
            batch = next(batches)
        loss = state["model"](batch)
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def nothing() -> None:
    pass


def check(path: str, constraints: dict[str, Any], data: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    state = start(constraints, data)
    random = {"random": RngState()}
    expected = train(state, range(END), lambda: vescale.save(path, {**state, **random}))
    drawn = torch.rand(3)
    torch.manual_seed(4)  # what is loaded must not depend on where the new run began
    again = start(constraints, data)
    vescale.load(path, {**again, "random": RngState()})
    assert train(again, range(STOP, END), nothing) == expected[STOP:]
    assert torch.equal(torch.rand(3), drawn)
    for name, parameter in again["model"].state_dict().items():
        assert torch.equal(parameter, state["model"].state_dict()[name]), name


def _on_rank(path: str, name: str, extra: dict[str, Any]) -> None:
    constraints, data = DATA[name]
    check(path, {**constraints, **extra}, data)


@pytest.mark.by_day("planned noisy", "stream", "ready", "ready shuffled", "ready generator")
@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_a_run_resumed_within_an_epoch_draws_what_it_would_have_drawn(
    world2: World, tmp_path: Path, name: str
) -> None:
    world2.run(_on_rank, str(tmp_path / "step"), name, {"data_parallel.size": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["planned noisy", "ready noisy", "ready stream"])
@pytest.mark.parametrize("extra", [{}, {"tensor_parallel.size": 2}], ids=["alone", "tp2"])
def test_ranks_of_the_same_rows_draw_what_they_would_have_drawn(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, extra: dict[str, Any]
) -> None:
    world: World = request.getfixturevalue("world2" if extra else "world1")
    world.run(_on_rank, str(tmp_path / "step"), name, extra)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of this process: one that is a rank of a pool may start no workers."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WORKERS)
def test_workers_do_not_change_what_a_resumed_run_draws(tmp_path: Path, name: str) -> None:
    check(str(tmp_path / "step"), *WORKERS[name])
