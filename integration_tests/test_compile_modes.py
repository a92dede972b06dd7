"""Blocks that a plan compiles where the program has a default device, or a function mode."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import vescale
from vescale_parallel import compile_report
from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints, make_plan
from .test_compile import QUICK, ids, net

PLANS: dict[str, Constraints] = {
    "zero3": {DP: 2, ZERO: 3},
    # Has a mode of its own around the blocks, for hooks on tensors.
    "zero-bubble": {PP: 2, PARTS: 2, SCHEDULE: "zbv", VIRTUAL: 2},
}


class ForGelu(TorchFunctionMode):
    """Computes another function than a model asks for, as modes that quantize do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.tanh(*args) if func is F.gelu else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {"default device": default_device, "own mode": ForGelu}


def compiled_beside_one_device(mode: str, constraints: Constraints) -> None:
    alone = net(depth=4)
    plan = make_plan({**constraints, "compile": "blocks", "compile_backend": QUICK})
    model = vescale.parallelize(plan, net(depth=4))
    ranks = constraints.get(DP, 1)
    rows = ids().chunk(ranks)[vescale.data_parallel_rank(model)]
    with MODES[mode]():
        for _ in range(2):
            with warnings.catch_warnings():
                # A compiled block has no backward pass for its inputs alone.
                warnings.filterwarnings("ignore", "pipeline_parallel.schedule 'zbv'")
                loss, expected = model(rows), alone(ids())
            loss.backward()
            # Another order of sums of 24 tokens.
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    found = compile_report(model).values()
    assert any(block.num_graphs for block in found)  # A stage has one of two blocks.
    assert not any(block.eager for block in found)


@pytest.mark.by_day("default device-zero3", "own mode-zero-bubble")
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "plan"), [*itertools.product(MODES, PLANS)])
def test_blocks_are_compiled_within_modes_of_the_program(
    world2: World, mode: str, plan: str
) -> None:
    world2.run(compiled_beside_one_device, mode, PLANS[plan])
