"""Batches of a loop's own of which data-parallel ranks have other numbers of rows."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO, Constraints
from .programs import Plain, Run, both, right, rows
from .test_bad_input import check

pytestmark = pytest.mark.slow

PLANS: list[Constraints] = [{DP: 2}, {DP: 2, ZERO: 3}]


class Counted(Plain):
    """Its loss is a mean over targets."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(batch), batch["y"].argmax(1))


def _train(run: Run, model: nn.Module) -> None:
    model, optimizer = run.start(model)
    for batch in rows(3):
        part = {name: tensor[:5] for name, tensor in batch.items()}
        if run.constraints is not None:
            own = slice(0, 3) if os.environ["RANK"] == "0" else slice(3, 5)
            part = {name: tensor[own] for name, tensor in part.items()}
        loss = model(part)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def counted(run: Run) -> None:
    _train(run, Counted())


def mean_over_rows(run: Run) -> None:
    _train(run, Plain())


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", PLANS)
def test_a_mean_over_targets_is_that_of_one_device(world2: World, plan: Constraints) -> None:
    right(world2, counted, plan)


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", PLANS)
def test_a_mean_over_rows_is_refused(world2: World, plan: Constraints) -> None:
    message = "expected as many rows of a batch on every data-parallel rank for a scalar"
    check(world2, ValueError, message, both, mean_over_rows, plan)
