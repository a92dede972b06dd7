"""What waits for backward is on the host: the bits of the same plan without, and its order."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from vescale_parallel import ParallelPlan, parallelize, with_constraints
from vescale_parallel._pipeline.execution.run import watching
from vescale_parallel._plan.supported import check_supported
from vescale_testing import World

from .fake_gpu import fake_gpus

Constraints = dict[str, Any]
PP, PARTS, SCHEDULE, VIRTUAL, OFFLOAD = (
    f"pipeline_parallel.{name}"
    for name in ("size", "microbatches", "schedule", "virtual_stages", "offload_activations")
)
WIDTH, ROWS = 16, 16


class Block(nn.Module):
    """Views of one memory, results that are saved, numbers, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended = (q @ k.mT / 4).softmax(-1) @ v
        return x + self.drop(
            self.out(attended.tanh() * self.scale.to(x.dtype)).mT.contiguous().mT.relu_()
        )


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def _trained(constraints: Constraints, *, is_on_device: bool) -> tuple[list[Tensor], list[str]]:
    """Return losses and parameters of two steps, and what the last one copied and computed."""
    log: list[str] = []
    with contextlib.ExitStack() as entered:
        if is_on_device:
            device = entered.enter_context(entered.enter_context(fake_gpus())())
            log = device.log
        torch.manual_seed(0)
        model, optimizer = parallelize(
            with_constraints(ParallelPlan(), constraints),
            Net(),
            lambda m: SGD(m.parameters(), lr=0.1),
        )
        found: list[Tensor] = []
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x, y = (torch.randn(ROWS, 5, n, generator=generator) for n in (4, 3))
            copies = constraints.get("data_parallel.size", 1)
            rank = torch.distributed.get_rank() % copies
            log.clear()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*of weights apart")
                with watching(lambda operation, *_: log.append(str(operation))):
                    loss = model(x.chunk(copies)[rank], y.chunk(copies)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        found += [parameter.full_tensor().clone() for parameter in model.parameters()]
    return found, [*log]


def _compared(constraints: Constraints) -> list[str]:
    expected, _ = _trained(constraints, is_on_device=False)
    offloaded = {**constraints, OFFLOAD: True}
    found, log = _trained(offloaded, is_on_device=True)
    here, _ = _trained(offloaded, is_on_device=False)
    for values in (found, here):
        assert all(map(torch.equal, values, expected))
    return log


TWO: dict[str, Constraints] = {
    "1f1b": {PP: 2, PARTS: 4},
    "gpipe": {PP: 2, PARTS: 4, SCHEDULE: "gpipe"},
    "zbv": {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2},
    "dualpipev": {PP: 2, PARTS: 4, SCHEDULE: "dualpipev", VIRTUAL: 2},
    "interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "recomputed": {PP: 2, PARTS: 4, "recompute": "full"},
    "selective": {PP: 2, PARTS: 4, "recompute": "selective"},
}
BY_DAY = ("1f1b", "zbv")


@pytest.mark.by_day("1f1b")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in TWO],
)
def test_what_waits_is_on_the_host_and_comes_back_with_its_bits(world2: World, name: str) -> None:
    logs = world2.run(_compared, TWO[name])
    for rank, log in enumerate(logs):
        out, back = (sum(said.startswith(way) for said in log) for way in ("out", "in"))
        if "recompute" not in TWO[name]:  # else little is saved but by checkpointing
            # The last stage of 1F1B begins backward at once.
            assert (out > 0) == (name != "1f1b" or rank == 0), log
        assert out >= back
        assert not [said for said in log if said == "wait" or said.endswith("and waits")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        {"data_parallel.size": 2, "data_parallel.zero_stage": 1},
        {"data_parallel.size": 2, "data_parallel.zero_stage": 3},
        {"data_parallel.size": 2, "data_parallel.zero_stage": 3, "recompute": "full"},
        {"tensor_parallel.size": 1, "data_parallel.size": 2, "precision.param": "bfloat16"},
    ],
)
def test_beside_other_ranks_too(world4: World, more: Constraints) -> None:
    world4.run(_compared, {**TWO["gpipe"], **more})


def test_where_nothing_waits_or_is_not_seen_it_is_refused() -> None:
    with pytest.raises(ValueError, match="offload_activations is of micro-batches that wait"):
        with_constraints(ParallelPlan(), {OFFLOAD: True})
    plan = with_constraints(ParallelPlan(), {**TWO["1f1b"], OFFLOAD: True, "compile": "blocks"})
    with pytest.raises(ValueError, match="blocks' is not available with pipeline_parallel"):
        check_supported(plan, Net())
