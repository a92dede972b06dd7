"""Numbers that forward returns beside its loss, in a pipeline: one device's, or not returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP
from .programs import PIPELINE, Block, Run, both, right, rows
from .test_bad_input import check

METRICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "accuracy": lambda scores, y, _: (scores.argmax(-1) == y.argmax(-1)).double().mean(),
    "constant": lambda scores, y, _: torch.tensor(3.0, dtype=torch.float64),
    "mean": lambda scores, y, _: scores.detach().abs().mean(),
    "perplexity": lambda scores, y, loss: loss.detach().exp(),
    "root": lambda scores, y, loss: loss.detach().sqrt(),
    "most": lambda scores, y, _: scores.detach().abs().max(),
    "rows": lambda scores, y, _: torch.tensor(float(len(y)), dtype=torch.float64),
}


class Measured(nn.Module):
    def __init__(self, metric: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.metric = metric

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x, batch["y"])
        return {"loss": loss, "metric": METRICS[self.metric](x, batch["y"], loss)}


def trained(run: Run, metric: str, *, reads: bool = True, evaluates: bool = True) -> None:
    model, optimizer = run.start(Measured(metric))
    for batch in rows():
        found: Any = model(run.part(batch))
        found["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(found["loss"])
        if reads:
            run.keep(found["metric"].clone())
        if evaluates:
            with torch.no_grad():
                run.keep(model(run.part(batch))["metric"].clone())
    run.finish(model)


@pytest.mark.by_day("2 parts-mean", "4 parts-accuracy")
@pytest.mark.slow
@pytest.mark.parametrize("metric", ["accuracy", "constant", "mean"])
@pytest.mark.parametrize("plan", [PIPELINE, {PP: 2, PARTS: 4}], ids=["2 parts", "4 parts"])
def test_means_over_rows_are_those_of_one_device(
    world2: World, metric: str, plan: dict[str, Any]
) -> None:
    right(world2, functools.partial(trained, metric=metric), plan)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["perplexity", "root", "most", "rows"])
def test_what_is_no_mean_says_so_where_it_is_read(world2: World, metric: str) -> None:
    message = r"the tensor \['metric'\] of the model's output is not the mean of what micro-batche"
    check(world2, ValueError, message, both, functools.partial(trained, metric=metric), PIPELINE)


@pytest.mark.by_day("pp x dp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [PIPELINE, {PP: 2, PARTS: 2, DP: 2}], ids=["pp", "pp x dp"])
def test_what_is_no_mean_and_is_not_read_changes_nothing(
    world2: World, world4: World, plan: dict[str, Any]
) -> None:
    how = {"reads": False, "evaluates": DP not in plan}
    program = functools.partial(trained, metric="perplexity", **how)
    right(world4 if DP in plan else world2, program, plan)


@pytest.mark.slow
def test_of_several_pipelines_it_is_not_returned_in_evaluation_either(world4: World) -> None:
    program = functools.partial(trained, metric="perplexity", reads=False)
    plan = {PP: 2, PARTS: 2, DP: 2}
    check(world4, ValueError, r"is not the mean of what micro-batches", both, program, plan)


@pytest.mark.by_day("mean")
@pytest.mark.slow
@pytest.mark.parametrize("metric", ["accuracy", "mean"])
def test_means_over_rows_of_several_pipelines(world4: World, metric: str) -> None:
    right(world4, functools.partial(trained, metric=metric), {PP: 2, PARTS: 2, DP: 2})
