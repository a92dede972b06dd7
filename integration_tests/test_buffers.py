"""Buffers that forward changes are one device's, however often a plan has forward run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, TP, VIRTUAL, ZERO, Constraints, make_plan
from .programs import WIDTH, Plain, Run, right, rows
from .test_bad_input import check

RECOMPUTE: Constraints = {TP: 2, "recompute": "full"}


@pytest.fixture
def broken2(world2: World) -> Iterator[World]:
    """Two ranks whose process group is of no more use after the test."""
    yield world2
    world2.close()


class Changing(nn.Module):
    """A block that changes buffers, in every way that there is."""

    count: Tensor
    latest: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        if kind == "spectral":
            self.layer = spectral_norm(self.layer)
        elif kind == "statistics":
            self.layer = nn.Sequential(self.layer, nn.BatchNorm1d(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("latest", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        if self.kind == "counter":
            self.count += 1
            y = y * self.count
        elif self.kind == "replaced":
            y = y + self.latest
            self.latest = y.detach().mean(0)
        elif self.kind == "drawn":
            self.latest.copy_(torch.rand(WIDTH))
        elif self.kind == "late":
            self.count += 1
        return x + y


class Changed(Plain):
    steps: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing(kind) for _ in range(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.steps += 1
        return super().forward({**batch, "x": batch["x"] * self.steps})


def changed(kind: str, run: Run) -> None:
    model, optimizer = run.start(Changed(kind))
    for batch in rows():
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
        for _, buffer in sorted(model.named_buffers()):
            run.keep(buffer)
    model.eval()
    with torch.no_grad():
        run.keep(model(run.part(rows()[0])))
    run.finish(model)
    for _, buffer in sorted(model.named_buffers()):
        run.keep(buffer)


@pytest.mark.parametrize("kind", ["counter", "replaced", "spectral", "statistics"])
def test_blocks_that_run_again_start_from_the_buffers_of_the_first_run(
    world2: World, kind: str
) -> None:
    right(world2, functools.partial(changed, kind), RECOMPUTE)


@pytest.mark.by_day("statistics-constraints0", "counter-constraints1", "spectral-constraints2")
@pytest.mark.parametrize(
    ("kind", "constraints"),
    [
        ("statistics", {PP: 2, PARTS: 1}),
        ("counter", {PP: 2, PARTS: 2}),
        ("spectral", {PP: 2, PARTS: 2, "recompute": "full"}),
        ("counter", {PP: 2, PARTS: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2}),
    ],
)
def test_every_stage_has_the_buffers_of_one_device(
    world2: World, kind: str, constraints: Constraints
) -> None:
    right(world2, functools.partial(changed, kind), constraints)


def call_twice(kind: str, constraints: Constraints) -> None:
    model: Any = vescale.parallelize(make_plan(constraints), Changed(kind).double())
    for again in ("late", kind):
        model(rows()[0]).backward()
        for block in model.blocks:
            block.kind = again


def test_a_buffer_of_a_micro_batch_is_refused(broken2: World) -> None:
    parts: Constraints = {PP: 2, PARTS: 2}
    message = "buffer 'latest' depends on all rows"
    check(broken2, ValueError, message, call_twice, "replaced", parts)
    message = r"'blocks\.0\.latest' is changed by forward"
    check(broken2, ValueError, message, call_twice, "drawn", parts)


@pytest.mark.parametrize("constraints", [RECOMPUTE, {PP: 2, PARTS: 1}])
def test_a_buffer_that_only_a_later_call_changes_is_refused(
    broken2: World, constraints: Constraints
) -> None:
    message = r"'blocks\.\d\.count'"
    check(broken2, Exception, message, call_twice, "never", constraints)


class Idle(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.busy = nn.Parameter(torch.ones(()))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward({**batch, "x": batch["x"] * self.busy})


def idle(run: Run) -> None:
    model, _ = run.start(Idle())
    model(run.part(rows()[0])).backward()
    assert model.idle.grad is None
    assert model.busy.grad is not None
    run.keep(model.busy.grad)


def test_a_parameter_that_no_stage_uses_has_no_gradient(world2: World) -> None:
    right(world2, idle, {PP: 2, PARTS: 2})


class ReadsABlock(Plain):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        weight = self.blocks[1].get_parameter("up.weight")
        y = F.linear(self.logits(batch), weight) @ weight
        return F.mse_loss(y, batch["y"])


def read_a_block(*, grad: bool) -> None:
    model = vescale.parallelize(make_plan({DP: 2, ZERO: 2}), ReadsABlock().double())
    rank = torch.distributed.get_rank()
    with torch.set_grad_enabled(grad):
        model({name: x.chunk(2)[rank] for name, x in rows()[0].items()})


@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_that_is_read_outside_of_its_block_is_named(
    broken2: World, grad: bool
) -> None:
    check(
        broken2,
        ValueError,
        r"'blocks\.1\.[\w.]*weight'",
        functools.partial(read_a_block, grad=grad),
    )


class Logits(Plain):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.logits(batch)


def count_warnings() -> int:
    model = vescale.parallelize(make_plan({DP: 2}), Logits().double())
    batch = {n: x.chunk(2)[torch.distributed.get_rank()] for n, x in rows()[0].items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch).mean().backward()
        model(batch).sum().backward()
    return sum("no scalar loss" in str(each.message) for each in caught)


def test_every_line_that_computes_a_loss_is_warned_of_once(world2: World) -> None:
    assert world2.run(count_warnings) == [2, 2]


class WithPenalty(nn.Module):
    """Returns a scalar that is no loss, or a loss, beside the logits that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.inner.logits(batch)
        return logits, logits.square().mean()


def texts_of_a_loss_beside_logits(*, outside: bool) -> int:
    model = vescale.parallelize(make_plan({DP: 2}), WithPenalty().double())
    batch = {n: x.chunk(2)[torch.distributed.get_rank()] for n, x in rows()[0].items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logits, loss = model(batch)
            (logits.sum() + loss if outside else loss).backward()
    return sum("beside a scalar. A loss" in str(each.message) for each in caught)


@pytest.mark.parametrize("outside", [False, True])
def test_a_loss_made_of_what_lies_beside_a_scalar_is_warned_of(
    world2: World, outside: bool
) -> None:
    made = functools.partial(texts_of_a_loss_beside_logits, outside=outside)
    assert world2.run(made) == [int(outside)] * 2
