"""Every package has one logger: what was decided at INFO, once; what one rank does at DEBUG."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import vescale
from vescale_testing import World

PACKAGES = ("ckpt", "deferred", "dtensor", "parallel", "planner")


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[tuple[str, int, str, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        rank: int = record.__dict__["rank"]
        self.seen.append((record.name, record.levelno, record.getMessage(), rank))


def _program(path: str, level: int) -> list[tuple[str, int, str, int]]:
    """Return what a program is told: logger, level, message and rank."""
    records, above = _Records(), logging.getLogger("vescale")
    above.addHandler(records)
    above.setLevel(level)
    try:
        torch.manual_seed(0)
        model = vescale.deferred_init(nn.Linear, 7, 8)
        plan = vescale.generate_plan(model, {"data_parallel.zero_stage": 3}, cluster="cpu")
        model = vescale.parallelize(plan, model)
        vescale.save(path, {"model": model})
        vescale.load(path, {"model": model})
    finally:
        above.removeHandler(records)
        above.setLevel(logging.NOTSET)
    return records.seen


def test_what_was_decided_is_said_by_rank_0_alone(world2: World, tmp_path: object) -> None:
    first, second = world2.run(_program, f"{tmp_path}/checkpoint", logging.INFO)
    assert second == []
    said = {name: message for name, _, message, _ in first}
    chosen = "chose data parallel 2, ZeRO 3, gathered once a step for cpu, in"
    assert said["vescale.planner"].startswith(chosen)
    assert any("parallelizing Linear on 2 ranks: plan for 2" in m for *_, m, _ in first)
    assert said["vescale.deferred"] == "constructed Linear without its 256 bytes"
    assert any("saved 2 tensors of 2 ranks to" in message for *_, message, _ in first)
    assert said["vescale.ckpt"].startswith("loaded ")
    assert all(rank == 0 for *_, rank in first)


def test_what_a_rank_does_every_rank_says(world2: World, tmp_path: object) -> None:
    for rank, seen in enumerate(world2.run(_program, f"{tmp_path}/checkpoint", logging.DEBUG)):
        detail = [(name, message, of) for name, level, message, of in seen if level < logging.INFO]
        assert all(of == rank for *_, of in detail)
        owned = [message for name, message, _ in detail if name == "vescale.parallel"]
        assert owned == ["this rank owns 32 of 64 parameter elements, 128 bytes"]


@pytest.mark.slow
def test_nothing_is_printed_unless_a_program_asks() -> None:
    program = (
        "import logging, vescale, vescale_ckpt, torch; "
        "vescale.parallelize(vescale.generate_plan(torch.nn.Linear(2, 2), cluster='cpu', "
        "world_size=1), torch.nn.Linear(2, 2)); "
        "vescale_ckpt.save, vescale_ckpt.load; "  # its modules are imported when they are used
        f"names = {PACKAGES!r}; "
        "assert all(logging.getLogger('vescale.' + n).handlers for n in names)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
