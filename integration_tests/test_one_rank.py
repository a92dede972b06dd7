"""What a parallelized model costs beside the plain one where there is one rank: counted.

A step of one rank dispatches the operators of the plain model, and so few more that their number
does not depend on the model; the functions of Python that it calls beyond are a bounded number for
a parameter and for a module, whatever the stage of ZeRO.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import vescale
from vescale_parallel import ParallelPlan, with_constraints

from .fake_ranks import IDS, WARM_UP, adamw, llama, rank_0_of
from .test_operator_counts import Operators

pytestmark = pytest.mark.slow


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _counted(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Operators, int]:
    """Return the operators of a step, and how many functions of Python it calls."""
    for _ in range(WARM_UP):
        _step(model, optimizer)
    with Operators() as operators:
        _step(model, optimizer)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        _step(model, optimizer)
    finally:
        sys.setprofile(before)
    return operators, calls


@pytest.mark.by_day("0")
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[pytest.mark.nightly] * (stage in (1, 2))) for stage in range(4)],
)
def test_one_rank_does_little_beyond_the_plain_model(stage: int) -> None:
    beyond, calls = dict[int, dict[str, int]](), dict[int, int]()
    for layers in (2, 4):
        plain = llama(layers)
        expected, of_plain = _counted(plain, adamw(plain))
        said = {"data_parallel.size": 1, "data_parallel.zero_stage": stage}
        with rank_0_of(1):
            parallel = vescale.parallelize(
                with_constraints(ParallelPlan(), said), llama(layers), adamw
            )
            found, of_ours = _counted(*parallel)
        found.counts.subtract(expected.counts)
        beyond[layers] = {name: number for name, number in found.counts.items() if number}
        calls[layers] = of_ours - of_plain
    # A tensor of flags: which parameters have a gradient. And what stands for the public
    # parameters in the graph of a call, to which its two results lead.
    assert (
        beyond[2]
        == beyond[4]
        == {
            "aten.lift_fresh.default": 1,
            "aten.zeros.default": 2,
            "aten.view.default": 1,
            "aten.detach.default": 2,
        }
    )
    names = [name for name, _ in llama(2).named_parameters() if ".layers.0." in name]
    modules = [name for name, _ in llama(2).named_modules() if ".layers.0" in name]
    of_a_layer = (calls[4] - calls[2]) / 2
    assert of_a_layer <= 26 * len(names) + 4 * len(modules)
