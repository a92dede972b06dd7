"""What code of a model keeps outside of it is as before behind a trial."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.kept_outside import KeptOutside, nothing_kept_outside

LOSSES, LATEST = list[Tensor](), deque[int]([1, 2], maxlen=2)
TABLES: dict[str, Any] = {"kept": 1}
number = 0


class Schedule:
    step = 0

    def __init__(self) -> None:
        self.seen = set[int]()

    def advance(self) -> None:
        self.seen.add(len(self.seen))
        Schedule.step += 1


SCHEDULE = Schedule()


@functools.cache
def table(length: int) -> Tensor:
    return torch.arange(length)


def save(loss: Tensor) -> None:
    global number
    number += 1
    LOSSES.append(loss)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        save(y.sum())
        LATEST.append(3)
        TABLES[str(len(TABLES))] = table(len(x))
        SCHEDULE.advance()
        return y


def state() -> object:
    held = len(LOSSES), list(LATEST), dict(TABLES), number, table.cache_info().currsize
    return (*held, Schedule.step, set(SCHEDULE.seen))


def test_lists_counters_caches_and_objects_are_as_before() -> None:
    model = Writes()
    before, seen = state(), SCHEDULE.seen
    with nothing_kept_outside(model):
        model(torch.ones(3, 2))
        assert state() != before
    assert state() == before
    assert SCHEDULE.seen is seen


def test_what_has_a_graph_is_named() -> None:
    model = Writes()
    kept = KeptOutside(model)
    with torch.no_grad():
        model(torch.ones(3, 2))
    assert not kept.handed_over()
    model(torch.ones(3, 2))
    assert [name for name, _ in kept.handed_over()] == ["LOSSES"]
    kept.put_back()
    assert not kept.handed_over()


def test_objects_that_hold_themselves_are_looked_at_once() -> None:
    SCHEDULE.__dict__["self"] = SCHEDULE
    try:
        with nothing_kept_outside(Writes()):
            SCHEDULE.seen.add(7)
        assert not SCHEDULE.seen
    finally:
        del SCHEDULE.__dict__["self"]
