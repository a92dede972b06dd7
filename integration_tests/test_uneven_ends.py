"""A last batch whose rows do not divide over ranks: one device's evaluation, or an error."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .models import HandWritten
from .training import samples

SIZE, COUNT = 4, 15


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 4)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.embed(batch["input_ids"]).square().mean()


def _evaluated(zero_stage: int) -> None:
    torch.manual_seed(0)
    alone, model = HandWritten().double(), HandWritten().double()
    model.load_state_dict(alone.state_dict())
    rows = samples(2, uneven=True)[:COUNT]
    ready = DataLoader(rows, batch_size=SIZE)  # pyright: ignore[reportArgumentType]: a list is a data set
    plan = with_constraints(
        vescale.ParallelPlan(), {"data_parallel.size": 2, "data_parallel.zero_stage": zero_stage}
    )
    model, loader = vescale.parallelize(plan, model, dataset=ready)
    with torch.no_grad():
        expected = [alone(batch) for batch in ready]
        found = [model(batch) for batch in loader]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_uneven_last_batch_is_evaluated_as_on_one_device(
    world2: World, zero_stage: int
) -> None:
    world2.run(_evaluated, zero_stage)


def _refused(trains: bool) -> tuple[int, str]:
    rows = samples(2)[:COUNT]
    ready = DataLoader(rows, batch_size=SIZE)  # pyright: ignore[reportArgumentType]: a list is a data set
    plan = with_constraints(vescale.ParallelPlan(), {"data_parallel.size": 2})
    model, loader = vescale.parallelize(plan, Regression(), dataset=ready)
    done = 0
    try:
        with torch.set_grad_enabled(trains):
            for batch in loader:
                model(batch)
                done += 1
    except ValueError as error:
        return done, str(error)
    return done, ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trains", "text"),
    [(True, "has 3 rows, which do not divide over the 2"), (False, "scalar that need not count")],
)
def test_what_would_not_be_one_devices_number_is_refused_on_all_ranks(
    world2: World, trains: bool, text: str
) -> None:
    for done, message in world2.run(_refused, trains):
        assert done == COUNT // SIZE
        assert text in message
        assert "drop_last=True" in message
