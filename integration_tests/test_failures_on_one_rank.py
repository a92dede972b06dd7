"""An exception on one rank, wherever user code runs in a step, ends all ranks with its text.

A rank whose program dies closes its connections, which the others notice at once. So every case
here ends as a program does: by ``sys.excepthook`` and the end of the process. No collective may
time out: the world's timeout is a minute, a test's bound is less.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import vescale
from vescale_testing import RankError, World

from .models import HandWritten, batches
from .plans import FOUR, TWO, Constraints, make_plan

TEXT = "row 17 is bad"
BOUND = 50.0  # seconds
STEPS = 3
ROWS = "batch.global_size"

# What fails: where, on which rank, in which step; -1 is before the first.
_armed: tuple[str, int] = ("", -1)
_step = -1


def reach(place: str) -> None:
    """Raise if this is where, when and on which rank it was asked for."""
    if _armed == (place, dist.get_rank()):
        raise LookupError(TEXT)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        reach("function")
        return grad


class Reaches(nn.Module):
    """A block that comes by places where user code may fail."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BSF: Tensor) -> tuple[Tensor, None]:
        reach("inside")
        x_BSF, _ = self.block(x_BSF)
        if _armed[0] == "function":
            x_BSF = FailsInBackward.apply(x_BSF)
        if _armed[0] == "gradient_hook" and x_BSF.requires_grad:
            x_BSF.register_hook(lambda _: reach("gradient_hook"))
        return x_BSF, None


class Model(HandWritten):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reaches(block) for block in self.blocks)
        self.blocks[1].register_forward_hook(lambda *_: reach("forward_hook"))
        self.blocks[3].register_forward_hook(lambda *_: reach("forward_hook"))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids_BS, labels_BS = batch["input_ids"], batch["labels"]
        reach("before")
        x_BSF = self.embed(ids_BS) + self.positions[:, : ids_BS.shape[1]]
        for block in self.blocks:
            x_BSF, _ = block(x_BSF)
        reach("after")
        if _armed[0] == "branch" and bool(labels_BS.sum() > 0):
            reach("branch")
        logits_BSV = self.head(self.norm(x_BSF))
        return criterion(logits_BSV, labels_BS)


def criterion(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    reach("loss")
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._batches = batches(STEPS + 1)

    def __len__(self) -> int:
        return 8 * (STEPS + 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        reach("dataset")
        return {name: rows[index % 8] for name, rows in self._batches[index // 8].items()}


def make_optimizer(model: nn.Module) -> Optimizer:
    reach("optimizer_fn")
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: reach("step_hook"))
    return optimizer


def make_scheduler(optimizer: Optimizer) -> LambdaLR:
    reach("lr_scheduler_fn")

    def factor(_: int) -> float:
        reach("lr_lambda")
        return 1.0

    return LambdaLR(optimizer, factor)


def train(constraints: Constraints, place: str, rank: int, step: int) -> None:
    global _armed
    if step < 0:
        _armed = place, rank
    plan = make_plan({**constraints, ROWS: 8})
    model, optimizer, scheduler, loader = vescale.parallelize(
        plan, Model(), optimizer_fn=make_optimizer, lr_scheduler_fn=make_scheduler, dataset=Rows()
    )
    rows: Iterator[Any] = iter(loader)
    for each in range(STEPS):
        if each == step:
            _armed = place, rank
        loss = model(next(rows))
        reach("between")
        loss.backward()
        reach("after_backward")
        if place == "own_collective":
            reach("own_collective")
            dist.all_reduce(loss.detach())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    # What the ranks that rank 1 owes nothing more would do before they end.
    dist.barrier()


def live_and_die(directory: str, fn: Callable[..., None], *args: Any) -> None:
    """Run a program to its end, as the interpreter does; leave what it printed."""
    report = Path(directory) / str(dist.get_rank())
    code = 0
    try:
        fn(*args)
    except BaseException as error:
        with report.open("w", encoding="utf-8") as sys.stderr:
            sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    os._exit(code)


def leave(how: str) -> None:
    """Train longer on rank 0 than on rank 1, which ends in some way."""
    model = vescale.parallelize(make_plan(TWO["dp"]), HandWritten())
    for batch in batches(STEPS):
        own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        rows = {name: each[own] for name, each in batch.items()}
        model(rows).backward()
        if dist.get_rank() == 1 and how == "early":
            atexit._run_exitfuncs()
            os._exit(0)
        if dist.get_rank() == 1:
            os._exit(9)


def check(world: World, directory: Path, *args: Any) -> None:
    with pytest.raises(RankError) as caught:
        world.run(live_and_die, str(directory), train, *args, timeout=BOUND)
    for rank in range(world.world_size):
        assert "died with exit code" in caught.value.errors[rank], caught.value.errors[rank]
        report = directory / str(rank)
        assert report.exists(), f"rank {rank} raised nothing"
        assert TEXT in report.read_text("utf-8"), report.read_text("utf-8")


LAYOUTS: dict[str, tuple[int, Constraints]] = {
    "dp": (2, TWO["dp"]),
    "zero3": (2, TWO["zero3"]),
    "tp": (2, TWO["tp"]),
    "pp": (2, TWO["pp-1f1b"]),
    "pp-tp": (4, FOUR["pp-tp"]),
}
IN_STEPS = (
    "dataset", "before", "inside", "after", "branch", "forward_hook", "function", "gradient_hook",
    "loss", "between", "after_backward", "own_collective", "step_hook", "lr_lambda",
)  # fmt: skip
AT_THE_START = ("dataset", "optimizer_fn", "lr_scheduler_fn", "lr_lambda")
# Where a pipeline's last stage does not come by, or its first.
ON_FIRST_STAGE = {"before"}


def rank_of(place: str, layout: str) -> int:
    if layout.startswith("pp") and place in ON_FIRST_STAGE:
        return 0
    return LAYOUTS[layout][0] - 1


# The first step proves the plan, and so comes by the model's places in other ways.
EVERY = [
    (layout, place, step)
    for layout in LAYOUTS
    for step, places in ((-1, AT_THE_START), (0, IN_STEPS), (1, IN_STEPS))
    for place in places
]
# One for each way in which an error leaves a rank, and each way in which others wait.
DAILY = [
    ("dp", "between", 1),
    ("zero3", "dataset", 1),
    ("tp", "dataset", -1),
    ("tp", "function", 1),
    ("pp", "step_hook", 1),
    ("pp-tp", "inside", 1),
]
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=marks)
    for case in EVERY
    for marks in ([pytest.mark.slow] if case in DAILY else [pytest.mark.nightly],)
]


@pytest.mark.by_day("dp-between-1", "zero3-dataset-1", "tp-dataset--1")
@pytest.mark.parametrize(("layout", "place", "step"), CASES)
def test_an_exception_on_one_rank_ends_all_ranks_with_its_text(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    layout: str,
    place: str,
    step: int,
) -> None:
    # How long after the first one that died the last one may: it may yet have work of its own.
    monkeypatch.setattr("vescale_testing._pool.GRACE_SECONDS", BOUND)
    size, constraints = LAYOUTS[layout]
    world: World = request.getfixturevalue(f"world{size}")
    check(world, tmp_path, constraints, place, rank_of(place, layout), step)


LEAVES = {
    "early": "rank 1 ended its program: did it have fewer batches, or stop early? Every rank has",
    "killed": "a rank's process ended without a word, as one that is killed does",
}


@pytest.mark.by_day("early")
@pytest.mark.slow
@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_left_is_told_of_by_those_that_waited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world2: World, how: str
) -> None:
    monkeypatch.setattr("vescale_testing._pool.GRACE_SECONDS", BOUND)
    with pytest.raises(RankError) as caught:
        world2.run(live_and_die, str(tmp_path), leave, how, timeout=BOUND)
    report = (tmp_path / "0").read_text("utf-8")
    assert LEAVES[how] in report, report
    assert "PeerError" in report.splitlines()[-1]
    assert "died with exit code" in caught.value.errors[1]


def stop_early(directory: str, constraints: Constraints, num_steps: int) -> None:
    """Train with a loop that is shorter on the last rank; end as the interpreter does."""
    report = Path(directory) / str(dist.get_rank())
    is_last = dist.get_rank() == dist.get_world_size() - 1
    plan = make_plan({**constraints, ROWS: 8})
    model, optimizer, loader = vescale.parallelize(
        plan, Model(), optimizer_fn=make_optimizer, dataset=Rows()
    )
    try:
        for step, batch in enumerate(loader):
            if is_last and step == num_steps:
                break
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        report.write_text(str(error), encoding="utf-8")
        os._exit(1)
    atexit._run_exitfuncs()  # as the interpreter does, before connections close
    os._exit(0)


@pytest.mark.by_day("dp", "zero3")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "zero3", "pp"])
def test_a_loop_that_ends_early_on_one_rank_ends_all_with_its_name(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str
) -> None:
    monkeypatch.setattr("vescale_testing._pool.GRACE_SECONDS", BOUND)
    size, constraints = LAYOUTS[layout]
    world: World = request.getfixturevalue(f"world{size}")
    with pytest.raises(RankError):
        world.run(stop_early, str(tmp_path), constraints, 1, timeout=BOUND)
    assert "rank 1 ended its program" in (tmp_path / "0").read_text("utf-8")
