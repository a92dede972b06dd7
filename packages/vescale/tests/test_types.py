"""What parallelize returns, as pyright sees it; ``nox -s types`` checks this file."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import vescale
from vescale import ParallelPlan
from vescale_parallel import Batch, ParallelLoader
from vescale_testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def several(model: nn.Module) -> list[SGD]:
    return [sgd(model)]


def step_lr(optimizer: SGD) -> StepLR:
    return StepLR(optimizer, 1)


def kinds() -> list[tuple[str, ...]]:
    plan, rows = ParallelPlan(batch=Batch(global_size=2)), [torch.ones(4)] * 4
    one = assert_type(vescale.parallelize(plan, Net()), Net)
    two = assert_type(vescale.parallelize(plan, Net(), sgd), tuple[Net, SGD])
    lists = assert_type(vescale.parallelize(plan, Net(), several), tuple[Net, list[SGD]])
    of_class = assert_type(vescale.parallelize(plan, Net(), AdamW), tuple[Net, AdamW])
    of_lambda = vescale.parallelize(plan, Net(), lambda net: SGD(net.linear.parameters(), lr=0.1))
    assert_type(of_lambda, tuple[Net, SGD])
    three = assert_type(vescale.parallelize(plan, Net(), sgd, step_lr), tuple[Net, SGD, StepLR])
    loader = vescale.parallelize(plan, Net(), dataset=rows)
    assert_type(loader, tuple[Net, ParallelLoader])
    no_scheduler = vescale.parallelize(plan, Net(), sgd, None, rows)
    assert_type(no_scheduler, tuple[Net, SGD, ParallelLoader])
    four = vescale.parallelize(plan, Net(), sgd, step_lr, rows)
    assert_type(four, tuple[Net, SGD, StepLR, ParallelLoader])
    found: list[tuple[Any, ...]] = [
        (one,), two, lists, of_class, of_lambda, three, loader, no_scheduler, four,
    ]  # fmt: skip
    return [tuple(type(each).__name__ for each in parts) for parts in found]


def test_the_types_that_are_told_are_those_that_are_returned(world1: World) -> None:
    assert world1.run(kinds) == [
        [
            ("Net",),
            ("Net", "SGD"),
            ("Net", "list"),
            ("Net", "AdamW"),
            ("Net", "SGD"),
            ("Net", "SGD", "StepLR"),
            ("Net", "ParallelLoader"),
            ("Net", "SGD", "ParallelLoader"),
            ("Net", "SGD", "StepLR", "ParallelLoader"),
        ]
    ]
