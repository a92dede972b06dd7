"""Modules that are called more often where there are more rows than a check runs a model on.

[Note: as many rows as there are] A check runs a model on few rows. Ghost batch norm cuts a batch
into chunks of 128 rows and normalizes each: of few rows there is one chunk, and the rows of one
rank make fewer than those of all. Rows meet in the norm, which would run over the rows of all
ranks each time that a rank calls it. So where rows meet in a module, it is counted how often it is
called for the rows of a rank and for those of all ranks, on fake tensors. Where that differs its
caller decides by the number of rows, and has to see all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.runs import RowCheckError
from vescale_parallel._model.copies import snapshot
from vescale_parallel._trace.fake_run import FakeRun, Listener
from vescale_parallel._trace.fake_tensors import ObservationError

from .small_batches import some_rows, within


@dataclass
class CallsOfMoreRows:
    """How often modules of a model are called for the rows of a rank, and of all ranks.

    Attributes:
        model: To run.
        given: What a rank calls it with.
        num_rows: How many rows that has.
        num_ranks: That share a batch.
        is_scaled_down: Whether it has a smaller vocabulary than the real one.
    """

    model: nn.Module
    given: Given
    num_rows: int
    num_ranks: int
    is_scaled_down: bool
    _counts: list[Counter[str]] | None = field(default=None, init=False)

    def callers(self, regions: Collection[str]) -> dict[str, str]:
        """Return what has to be a region since it decides how often one is called, and why."""
        if self.num_ranks == 1 or not any(regions):
            return {}
        if self._counts is None:
            self._counts = self._counted()
        if not self._counts:
            return {}
        few, many = self._counts
        found: dict[str, str] = {}
        for region in regions:
            fqn = region
            while fqn and few[fqn] != many[fqn]:
                fqn = _caller(fqn, many)
                found[fqn] = f"how often it calls {region!r} depends on the number of rows"
        return found

    def _counted(self) -> list[Counter[str]]:
        """Return the calls for each number of rows; nothing if they cannot be counted."""
        few = max(self.num_rows - self.num_rows % 2, 2)
        try:
            return [self._calls(few), self._calls(few * self.num_ranks)]
        except (ObservationError, RowCheckError, ValueError, TypeError):
            return []

    def _calls(self, num_rows: int) -> Counter[str]:
        rows = some_rows(self.given, self.num_rows, uneven=False, num_few=num_rows, repeats=True)
        whole: Any = within(self.model, rows[0]) if self.is_scaled_down else rows[0]
        run, calls = FakeRun(self.model), _Calls()
        with torch.no_grad():
            # What forward puts into a cache that it is given is not to stay there.
            run.forward(run.batch(snapshot(whole)), calls)
        return calls.found


class _Calls(Listener):
    def __init__(self) -> None:
        self.found = Counter[str]()

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.found[fqn] += 1


def _caller(fqn: str, calls: Counter[str]) -> str:
    """Return the module around one that is called itself, as a list of modules is not."""
    around = fqn.rpartition(".")[0]
    while around and not calls[around]:
        around = around.rpartition(".")[0]
    return around
