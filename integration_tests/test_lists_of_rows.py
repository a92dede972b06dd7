"""Models that return lists or tuples with an element of each row: the features of images."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from vescale_testing import World

from .plans import DP, PARTS, PP, ZERO, Constraints
from .programs import Plain, Program, Run, right, rows


class Listing(Plain):
    """Returns what it makes of each row: of one length, or of one that the row decides."""

    def __init__(self, *, uneven: bool = False, has_loss: bool = True) -> None:
        super().__init__()
        self.uneven, self.has_loss = uneven, has_loss

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        made = self.logits(batch)
        lengths = [3 + int(self.uneven and x[0] > 0) for x in batch["x"]]
        found = [row[:length] for row, length in zip(made, lengths, strict=True)]
        if not self.has_loss:
            return {"of_rows": tuple(found)}
        return {"loss": F.mse_loss(made, batch["y"]), "of_rows": found, "logits": made}


class Contrasting(Listing):
    """Tells the rows of all ranks apart beside that."""

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        found = super().forward(batch)
        scores = found["logits"] @ found["logits"].T
        return {**found, "loss": F.cross_entropy(scores, torch.arange(len(scores)))}


def step(run: Run, optimizer: Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.keep(loss)


def contrasted(run: Run) -> None:
    model, optimizer = run.start(Contrasting())
    for batch in rows():
        step(run, optimizer, model(run.part(batch))["loss"])
    run.finish(model)


def trained(run: Run, *, uneven: bool) -> None:
    """Reads the list in evaluation, between steps."""
    model, optimizer = run.start(Listing(uneven=uneven))
    for batch in rows():
        step(run, optimizer, model(run.part(batch))["loss"])
        with torch.no_grad():
            output = model(run.part(batch))
        assert type(output["of_rows"]) is list
        assert len(output["of_rows"]) == len(output["logits"])
        each = torch.stack([x.sum() for x in output["of_rows"]])
        if DP in (run.constraints or {}):  # which returns the list of a rank's rows
            parts = [torch.empty_like(each) for _ in range(2)]
            dist.all_gather(parts, each)
            each = torch.cat(parts)
        run.keep(each)
    run.finish(model)


def by_the_loop(run: Run, *, uneven: bool) -> None:
    """Makes the loss of the elements, but for the second."""
    model, optimizer = run.start(Listing(uneven=uneven, has_loss=False))
    for batch in rows():
        found = model(batch)["of_rows"]
        loss = sum((x.square().mean() for x in (*found[:1], *found[2:])), torch.zeros(()))
        step(run, optimizer, loss)
    run.finish(model)


PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulation": {DP: 2, "batch.gradient_accumulation": 2},
    "pp": {PP: 2, PARTS: 2},
    "uneven pp": {PP: 2, PARTS: 3},
}


@pytest.mark.by_day("pp-True", "accumulation-False")
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_are_told_in_lists(world2: World, plan: str, uneven: bool) -> None:
    right(world2, functools.partial(trained, uneven=uneven), PLANS[plan])


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_that_contrasts_rows_may_return_lists(world2: World, zero: int) -> None:
    right(world2, contrasted, {DP: 2, ZERO: zero})


@pytest.mark.by_day("True")
@pytest.mark.parametrize("uneven", [False, True])
def test_a_loop_makes_its_loss_of_a_list(world2: World, uneven: bool) -> None:
    program: Program = functools.partial(by_the_loop, uneven=uneven)
    right(world2, program, {PP: 2, PARTS: 2})
