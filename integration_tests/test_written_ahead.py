"""Parameters that forward writes while their next gather is under way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import ParallelPlan, with_constraints
from vescale_testing import World

from .test_bad_input import check

pytestmark = pytest.mark.slow

WIDTH = 5


def _in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _in_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def _in_a_copy_of_data(parameter: nn.Parameter) -> None:
    parameter.data.copy_(parameter.data * 0.5)


def _in_detached(parameter: nn.Parameter) -> None:
    parameter.detach().mul_(0.5)


WRITES = {
    "in place": _in_place,
    "data": _in_data,
    "copy": _in_a_copy_of_data,
    "detached": _in_detached,
}


class Momentum(nn.Module):
    """Writes parameters of blocks before these run, as momentum encoders do; one runs twice."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        for at in (0, 1, 2, 1):
            for block in self.blocks:
                self.write(block.get_parameter("bias"))
            x = x + self.blocks[at](x).tanh()
        return x


def _run(model: Any, rows: list[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = []
    for each in rows:
        with torch.no_grad():
            outputs.append(model(each).clone())
    return outputs


def _check(write: str) -> None:
    torch.manual_seed(1)
    alone = Momentum(WRITES[write])
    rows = [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(3)]
    for depth in (0, 1, 2):
        model = _parallel(copy.deepcopy(alone), depth)
        own = [each.chunk(2)[vescale.data_parallel_rank(model)] for each in rows]
        assert all(map(torch.equal, _run(model, own), _run(copy.deepcopy(alone), own)))


def _parallel(model: nn.Module, depth: int) -> Any:
    constraints = {"size": 2, "zero_stage": 3, "prefetch": depth}
    said = {f"data_parallel.{key}": value for key, value in constraints.items()}
    return vescale.parallelize(with_constraints(ParallelPlan(), said), model)


def test_what_forward_writes_to_blocks_ahead_is_what_they_compute_with(world2: World) -> None:
    for write in WRITES:
        world2.run(_check, write)


def _write_on_one_rank(depth: int) -> None:
    model = _parallel(Momentum(lambda bias: None), depth)
    rows = torch.ones(2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(rows)
        model(rows * 2)
        model.write = _in_place if vescale.data_parallel_rank(model) else lambda bias: None
        model(rows * 3)


def test_a_write_on_one_rank_alone_stays_or_is_refused(world2: World) -> None:
    world2.run(_write_on_one_rank, 0)
    # What is under way is sent again, by one rank only.
    check(world2, ValueError, "writes the same parameters", _write_on_one_rank, 2)
    world2.close()
