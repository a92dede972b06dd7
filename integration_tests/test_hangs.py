"""A rank that waits in vain says in which module call, for whom, and where the others wait."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testing import World

from .models import HandWritten, batches
from .plans import TWO, Constraints, make_plan
from .short_group import in_short_group

SILENT = "rank 1 has said nothing for 3 s: it waits in no collective whose time ran out"


def said(fn: Any, *args: Any) -> str:
    """Return what a program would print of the error that a call raises; empty for none."""
    try:
        fn(*args)
    except RuntimeError as error:
        return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    return ""


def own_rows(constraints: Constraints, step: int) -> dict[str, torch.Tensor]:
    parts = make_plan(constraints).data_parallel.size
    part = dist.get_rank() if parts > 1 else 0
    return {name: rows.chunk(parts)[part] for name, rows in batches(3)[step].items()}


class Leaves(BaseException):
    """No error that anybody tells of."""


def leave(*_: Any) -> None:
    raise Leaves


def train(constraints: Constraints, lost_in: str) -> None:
    """Train; in the second step rank 1 leaves, in its forward or before its backward pass."""
    model = vescale.parallelize(make_plan(constraints), HandWritten())
    model(own_rows(constraints, 0)).backward()
    is_lost = dist.get_rank() == 1
    with contextlib.suppress(Leaves):
        if is_lost and lost_in in dict(model.named_modules()):
            model.get_submodule(lost_in).register_forward_pre_hook(leave)
        if is_lost and lost_in == "call":
            return
        loss = model(own_rows(constraints, 1))
        if not is_lost:
            loss.backward()


def hang(constraints: Constraints, lost_in: str) -> str:
    return said(train, constraints, lost_in)


CASES: dict[str, tuple[Constraints, str, tuple[str, ...]]] = {
    "zero3": (
        TWO["zero3"],
        "backward",
        ("over dp_shard of ranks 0, 1, in backward, at 'blocks.",),
    ),
    "zero3-call": (
        TWO["zero3"],
        "call",
        ("over dp_shard of ranks 0, 1, in a call of the model, outside",),
    ),
    "tp": (TWO["tp"], "blocks.2", ("over tp of ranks 0, 1, in forward of 'blocks.2.", "(Linear)")),
    "tp-backward": (TWO["tp"], "backward", ("over tp of ranks 0, 1, in backward, at 'blocks.3.",)),
    "pp": (
        TWO["pp-1f1b"],
        "blocks.2",
        (
            "for gradients of stage 1 over pp from pipeline rank 1",
            "backward of stage 0, micro-batch 0",
        ),
    ),
}


@pytest.fixture
def broken2(world2: World) -> Any:
    """Two ranks whose process group is of no more use after the test."""
    yield world2
    world2.close()


@pytest.mark.by_day("tp")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_waits_in_vain_says_in_which_module(
    broken2: World, tmp_path: Path, case: str
) -> None:
    constraints, lost_in, texts = CASES[case]
    report, _ = broken2.run(in_short_group, str(tmp_path), hang, constraints, lost_in)
    assert report, "rank 0 raised nothing"
    for text in (*texts, SILENT):
        assert text in report, report


class Stops(nn.Module):
    """A block in which rank 1 waits for something of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._waits = False  # a public flag that changes has the call compared before it runs

    def forward(self, x: Any) -> Any:
        if self._waits and dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
        return self.block(x)


def wait_apart() -> str:
    model = HandWritten()
    model.blocks = nn.ModuleList(Stops(block) for block in model.blocks)
    model = vescale.parallelize(make_plan(TWO["tp"]), model)
    model(own_rows(TWO["tp"], 0)).backward()
    stops = model.get_submodule("blocks.2")
    assert isinstance(stops, Stops)
    stops._waits = True
    return said(lambda: model(own_rows(TWO["tp"], 1)))


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_say_where(broken2: World, tmp_path: Path) -> None:
    first, second = broken2.run(in_short_group, str(tmp_path), wait_apart)
    assert "over tp of ranks 0, 1, in forward of 'blocks.2.block." in first, first
    assert second.startswith("RuntimeError\n"), second
    # It raised before this rank's own time ran out, or shortly after.
    assert "in forward of 'blocks.2' (Stops)" in first, first


def evaluates_alone(constraints: Constraints) -> str:
    model: Any = vescale.parallelize(make_plan(constraints), HandWritten())

    def step() -> None:
        model(own_rows(constraints, 0)).backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(own_rows(constraints, 1))

    return said(lambda: [step() for _ in range(2)])


@pytest.mark.slow
def test_a_loss_that_one_rank_evaluates_is_said_to_be_every_ranks(
    broken2: World, tmp_path: Path
) -> None:
    reports = broken2.run(in_short_group, str(tmp_path), evaluates_alone, TWO["dp"])
    said_of_all = "every rank has to call the model, backward and the optimizer as often"
    assert any(said_of_all in report for report in reports), reports


def raised_in_a_module() -> str:
    model = vescale.parallelize(make_plan(TWO["dp"]), HandWritten())

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("row 17 is bad")

    model.get_submodule("blocks.1").register_forward_hook(fail)
    return said(lambda: model(own_rows(TWO["dp"], 0)).backward())


@pytest.mark.slow
def test_who_waits_for_a_rank_that_raised_is_told_in_which_module_it_did(
    broken2: World, tmp_path: Path
) -> None:
    first, second = broken2.run(in_short_group, str(tmp_path), raised_in_a_module)
    assert first.startswith(
        "PeerError\nrank 1 raised RuntimeError: row 17 is bad; it was in forward"
    )
    assert "of 'blocks.1' (" in first
    assert second == "RuntimeError\nrow 17 is bad"


def calls_of_a_step() -> int:
    """Return how many functions of what tells positions a step calls."""
    model = vescale.parallelize(make_plan(TWO["tp"]), HandWritten())
    model(own_rows(TWO["tp"], 0)).backward()
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(
            ("where.py", "positions.py", "flight_recorder.py")
        ):
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        model(own_rows(TWO["tp"], 1)).backward()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_nothing_is_noted_while_nothing_is_wrong(world2: World) -> None:
    assert world2.run(calls_of_a_step) == [0, 0]
