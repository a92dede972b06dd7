"""What forward keeps in plain attributes is one device's where it computes with it, or is said."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import WIDTH, Block, Plain, Run, both, right, rows
from .test_bad_input import check

pytestmark = pytest.mark.slow

ACCUMULATED: Constraints = {DP: 2, "batch.gradient_accumulation": 2}
RECOMPUTED: Constraints = {DP: 2, "recompute": "full"}
PIPELINED: Constraints = {PP: 2, PARTS: 2}


class Keeping(Block):
    """Computes with what the calls before it left in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.number = kind, 0.0
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)
        self.seen = list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        match self.kind:
            case "new":
                y, self.mean = y - self.mean, 0.9 * self.mean + 0.1 * y.detach().mean(0)
            case "in_place":
                y = y - self.mean
                self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            case "number":
                y = y * (1 + self.number)
                self.number = 0.5 * self.number + y.mean().item()
            case "list":
                y = y * (1 + sum(self.seen))
                self.seen.append(y.mean().item())
            case _:
                raise ValueError(self.kind)
        return y


class InBlocks(Plain):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))


class ScaledLoss(Plain):
    """Divides its loss by the mean of those before."""

    mean = 1.0

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().forward(batch)
        scaled = loss / self.mean
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return scaled


class Contrast(Plain):
    """Tells rows from those of the batches before, in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.ones(8, WIDTH, dtype=torch.float64)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.logits(batch)
        others = (x @ self.queue.T).logsumexp(1).mean()
        self.queue = torch.cat([self.queue, x.detach()])[-8:]
        return others + F.mse_loss(x, batch["y"])


class Stateful(Plain):
    """Adds to every row what it had for that row in the call before."""

    state: Tensor | None = None

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.logits(batch)
        if self.state is not None:
            x = x + self.state
        self.state = x.detach()
        return F.mse_loss(x, batch["y"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "new": lambda: InBlocks(lambda: Keeping("new")),
    "in_place": lambda: InBlocks(lambda: Keeping("in_place")),
    "number": lambda: InBlocks(lambda: Keeping("number")),
    "list": lambda: InBlocks(lambda: Keeping("list")),
    "loss": ScaledLoss,
    "queue": Contrast,
    "rows": Stateful,
}


def trained(kind: str, run: Run) -> None:
    run.train((MODELS | COUNTING | DRAWING | READ)[kind](), given=rows(4))


@pytest.mark.by_day("in_place-plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}])
@pytest.mark.parametrize("kind", MODELS)
def test_what_the_next_call_reads_is_of_the_rows_of_all_ranks(
    world2: World, kind: str, plan: Constraints
) -> None:
    right(world2, functools.partial(trained, kind), plan)


@pytest.mark.by_day("in_place")
@pytest.mark.parametrize("kind", ["in_place", "loss"])
def test_ranks_that_share_matrices_keep_what_one_device_does(world4: World, kind: str) -> None:
    right(world4, functools.partial(trained, kind), {DP: 2, TP: 2})


@pytest.mark.by_day(
    "rows-keeps 'state' for every row of a batch and computes with it in the next call-plan0*"
)
@pytest.mark.parametrize("plan", [PIPELINED, ACCUMULATED])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("new", "'blocks.0': its attribute 'mean', which the next call reads, depends on all"),
        ("loss", "'the model': its attribute 'mean', which the next call reads"),
        ("rows", "keeps 'state' for every row of a batch and computes with it in the next call"),
    ],
)
def test_micro_batches_refuse_what_is_made_of_the_whole_batch(
    world2: World, kind: str, message: str, plan: Constraints
) -> None:
    check(world2, ValueError, message, both, functools.partial(trained, kind), plan)


class Counting(Block):
    """Computes with how often it was called, counted in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.calls = 0, list[int]()
        self.steps = torch.zeros((), dtype=torch.float64)
        self.named: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.steps += 1
        self.calls.append(self.number)
        self.named["calls"] = self.named.get("calls", 0) + 1
        factor = self.number * self.steps.clone() * len(self.calls) * self.named["calls"]
        return x + factor / 100 * super().forward(x)


class CountingModel(Plain):
    """Warms its loss up."""

    calls = 0

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(batch) * min(1.0, self.calls / 3)


class Temperature:
    """Falls from call to call."""

    value = 1.0

    def step(self) -> float:
        self.value *= 0.5
        return self.value


class Annealed(Plain):
    """Has an object of another class count."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = Temperature()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch) * (1 + self.temperature.step())


COUNTING: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: InBlocks(Counting),
    "model": CountingModel,
    "object": Annealed,
}


@pytest.mark.by_day("blocks-plan0")
@pytest.mark.parametrize("plan", [PIPELINED, ACCUMULATED, RECOMPUTED])
@pytest.mark.parametrize("kind", COUNTING)
def test_a_counter_counts_calls_of_the_model(world2: World, kind: str, plan: Constraints) -> None:
    right(world2, functools.partial(trained, kind), plan)


MAKE: dict[str, Callable[[int], Any]] = {
    "python": random.Random,
    "numpy": np.random.default_rng,
    "numpy's state": np.random.RandomState,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


class Drawing(Block):
    """Scales by what it draws from a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.generator = kind, MAKE[kind](3)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "python" | "numpy":
                scale = self.generator.random()
            case "numpy's state":
                scale = self.generator.rand()
            case _:
                scale = torch.rand((), generator=self.generator).item()
        return super().forward(x) * (0.5 + scale)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    kind: functools.partial(InBlocks, functools.partial(Drawing, kind)) for kind in MAKE
}


@pytest.mark.by_day("python-plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, {TP: 2}, ACCUMULATED, RECOMPUTED])
@pytest.mark.parametrize("kind", MAKE)
def test_generators_that_modules_hold_draw_the_numbers_of_one_device(
    world2: World, kind: str, plan: Constraints
) -> None:
    right(world2, functools.partial(trained, kind), plan)


@pytest.mark.by_day("numpy")
@pytest.mark.parametrize("kind", MAKE)
def test_a_pipeline_refuses_draws_from_generators_that_modules_hold(
    world2: World, kind: str
) -> None:
    message = "draws from a generator of its own"
    check(world2, Exception, message, both, functools.partial(trained, kind), PIPELINED)


class Logging(Plain):
    """Keeps what nothing but the program reads."""

    last, rows_of_rank, calls = 0.0, 0, 0

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().forward(batch)
        self.last, self.rows_of_rank = loss.item(), len(batch["x"])
        self.outputs = batch["x"]
        self.calls += 1
        return loss


class CountingBlock(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


READ: dict[str, Callable[[], nn.Module]] = {
    "logging": Logging,
    "counted": lambda: InBlocks(CountingBlock),
}


def said(kind: str, constraints: Constraints) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(kind, Run(constraints))
    return [str(each.message) for each in caught if "attributes of modules" in str(each.message)]


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, ACCUMULATED])
def test_what_the_program_alone_reads_is_warned_of_once_by_name(
    world2: World, plan: Constraints
) -> None:
    for told in world2.run(said, "logging", plan):
        assert len(told) == 1
        assert told[0].startswith("forward keeps 'last' in attributes of modules, made of rows")


def test_what_one_stage_has_is_warned_of_once_by_name(world2: World) -> None:
    for told in world2.run(said, "counted", PIPELINED):
        assert len(told) == 1
        assert "forward changes 'blocks.0.calls', 'blocks.1.calls'" in told[0]
        assert "ranks of other stages have them as they were" in told[0]
