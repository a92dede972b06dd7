"""Shards, gradients and the optimizer's state on the host: the bits of the same plan without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, parallelize, with_constraints

from .fake_gpu import fake_gpus

InThreads = Callable[..., list[Any]]
Constraints = dict[str, Any]
WIDTH = 6
ROWS = torch.arange(8.0 * WIDTH).view(8, WIDTH).sin()


class Net(nn.Module):
    """Blocks, a scalar, a tied weight, a frozen one and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return (self.last(x) * self.frozen).float().pow(2).mean()


def _models(count: int) -> list[Net]:
    torch.manual_seed(0)
    model = Net()
    return [copy.deepcopy(model) for _ in range(count)]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def _trained(in_threads: InThreads, constraints: Constraints) -> list[tuple[Tensor, ...]]:
    """Return losses, norms, parameters and state of every rank after some steps."""
    plan = with_constraints(ParallelPlan(), constraints)
    models = _models(plan.world_size)

    def of_rank(rank: int) -> tuple[Tensor, ...]:
        model, optimizer = parallelize(plan, models[rank], _adamw)
        found: list[Tensor] = []
        share = rank % plan.data_parallel.size
        for step in range(4):
            rows = (ROWS + step).chunk(plan.data_parallel.size)[share]
            loss = model(rows)
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found += [loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm]
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # written by hand, in ways that torch counts and does not
                with torch.no_grad():
                    model.first.bias.mul_(1.5)
                    model.blocks[1][0].bias.to_local().numpy()[:] *= 2
                    found.append(model(rows))
        found += [p.full_tensor() for p in model.parameters()]
        state = optimizer.state_dict()["state"]
        found += [
            v.full_tensor() if isinstance(v, DTensor) else v
            for each in state.values()
            for v in each.values()
        ]
        return tuple(found)

    return in_threads(plan.world_size, of_rank)


PLANS: dict[str, Constraints] = {
    "one rank": {},
    "one rank, zero3": {"data_parallel.zero_stage": 3},
    "zero0": {"data_parallel.size": 2},
    "zero1": {"data_parallel.size": 2, "data_parallel.zero_stage": 1},
    "zero2": {"data_parallel.size": 2, "data_parallel.zero_stage": 2},
    "zero3": {"data_parallel.size": 2, "data_parallel.zero_stage": 3},
    "hybrid": {
        "data_parallel.size": 4, "data_parallel.zero_stage": 3, "data_parallel.replicate_size": 2,
    },
    "bf16": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 3,
        "precision.param": "bfloat16", "precision.reduce": "float32",
    },
    "bf16, zero1": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 1, "precision.param": "bfloat16",
    },
    "accumulated": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 2, "batch.gradient_accumulation": 2,
    },
    "library": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 3,
        "data_parallel.reduction": "library",
    },
}  # fmt: skip


@pytest.mark.by_day("one rank", "zero3")
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_offload_has_the_bits_of_the_plan_without(
    in_threads: InThreads, name: str
) -> None:
    constraints = PLANS[name]
    expected = _trained(in_threads, constraints)
    kinds = ["optimizer"] + ["parameters"] * (constraints.get("data_parallel.zero_stage") == 3)
    for kind in kinds:
        found = _trained(in_threads, {**constraints, "data_parallel.offload": kind})
        for rank, others in zip(found, expected, strict=True):
            assert len(rank) == len(others)
            for value, other in zip(rank, others, strict=True):
                assert torch.equal(value, other)


PASSES = {
    "one rank": {"data_parallel.zero_stage": 0},
    "one rank, zero3": {"data_parallel.zero_stage": 3},
    "zero1": {"data_parallel.size": 2, "data_parallel.zero_stage": 1},
    "zero3": {"data_parallel.size": 2, "data_parallel.zero_stage": 3},
    "bf16": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 3, "precision.param": "bfloat16",
    },
    "accumulated": {
        "data_parallel.size": 2, "data_parallel.zero_stage": 3, "batch.gradient_accumulation": 4,
    },
}  # fmt: skip


@pytest.mark.by_day("one rank", "one rank, zero3")
@pytest.mark.parametrize("name", PASSES)
def test_beside_a_device_nothing_is_read_before_it_is_there_and_nobody_waits_in_backward(
    in_threads: InThreads, name: str
) -> None:
    constraints = PASSES[name]
    kinds = ["optimizer"] + ["parameters"] * (constraints["data_parallel.zero_stage"] == 3)
    expected = _on_devices(in_threads, constraints)
    for kind in kinds:
        found = _on_devices(in_threads, {**constraints, "data_parallel.offload": kind})
        for (values, log), (others, none) in zip(found, expected, strict=True):
            assert not {"wait"} & {*none}, "of plans without"
            assert all(map(torch.equal, values, others))
            # Of the first micro-batch; the second one waits for what that has sent.
            backward = log[log.index("backward of 2") : log.index("backward of 0")]
            assert not any("wait" in said for said in backward)


def _on_devices(
    in_threads: InThreads, constraints: Constraints
) -> list[tuple[list[Tensor], list[str]]]:
    """Return parameters after some steps, and what the last step copied and waited for."""
    plan = with_constraints(ParallelPlan(), constraints)
    models = _models(plan.world_size)

    def of_rank(rank: int) -> tuple[list[Tensor], list[str]]:
        with gpu() as device:
            model, optimizer = parallelize(plan, models[rank], _adamw)
            for index, block in enumerate(model.blocks):
                block.register_forward_hook(_said(device.log, index))
            for step in range(3):
                device.log.clear()
                loss = model((ROWS + step).chunk(plan.data_parallel.size)[rank])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            log = [*device.log]
            with torch.no_grad():
                model(ROWS.chunk(plan.data_parallel.size)[rank])
                for parameter in model.parameters():  # at once, while the device may still run
                    parameter._local_tensor.mul_(1.5)
                model(ROWS.chunk(plan.data_parallel.size)[rank])
            if plan.data_parallel.offload != "none":
                kept = [parameter._local_tensor for parameter in model.parameters()]
                for state in optimizer.state.values():
                    kept += [value for name, value in state.items() if name != "step"]
                assert all(device.is_host(tensor) for tensor in kept if tensor.numel())
        found = [parameter.full_tensor() for parameter in model.parameters()]
        return found, log

    with fake_gpus() as gpu:
        return in_threads(plan.world_size, of_rank)


def _said(log: list[str], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        log.append(f"forward of {index}")
        if output.requires_grad:
            output.register_hook(lambda _: log.append(f"backward of {index}"))

    return hook


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("offload", "again"), [("optimizer", 0), ("parameters", 1)])
def test_blocks_come_from_the_host_ahead_and_once_or_for_each_gather(
    in_threads: InThreads, offload: str, again: int, size: int
) -> None:
    constraints = {
        "data_parallel.size": size,
        "data_parallel.zero_stage": 3,
        "data_parallel.offload": offload,
    }
    block = 128 // size
    for _, log in _on_devices(in_threads, constraints):
        come, go = f"in {block}", f"out {block}"
        seen = [said for said in log if said in (come, go) or " of " in said]
        assert seen == [
            *(come, come, "forward of 0", come, "forward of 1", "forward of 2"),
            # The last block stays gathered for backward.
            *([come] * again), "backward of 2", go, *([come] * again), "backward of 1", go,
            *("backward of 0", go),
        ]  # fmt: skip
