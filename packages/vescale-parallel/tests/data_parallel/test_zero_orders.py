"""Forward and backward passes in unusual orders, under every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel import ParallelPlan, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
Grads = dict[str, Tensor | None]
WIDTH = 5
ROWS = torch.arange(4.0 * WIDTH, dtype=torch.float64).view(4, WIDTH) / 20


class Net(nn.Module):
    """Two blocks between two layers; how forward calls the blocks can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.order = (0, 1)
        self.frozen_call = self.recomputes = False
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        if self.recomputes:  # a backward pass within the pass
            x = checkpoint(lambda y: self.last(y).tanh(), x, use_reentrant=True)
        hidden: list[Tensor] = []
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
            hidden.append(x)
        if self.frozen_call:
            with torch.no_grad():
                x = x + self.blocks[0](x)
        return {"loss": self.last(x).pow(2).mean(), "early": hidden[0].pow(2).mean()}


Program = Callable[[Any, Callable[[Tensor], Tensor]], None]


def _evaluation_in_between(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    loss = model(rows(ROWS))["loss"]
    with torch.no_grad():
        model(rows(ROWS * 3))
    loss.backward()


def _two_forwards_first(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    losses = [model(rows(ROWS * scale))["loss"] for scale in (1, 2)]
    for loss in losses:
        loss.backward()


def _two_forwards_last_first(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    losses = [model(rows(ROWS * scale))["loss"] for scale in (1, 2)]
    for loss in reversed(losses):
        loss.backward()


def _one_graph_twice(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    loss = model(rows(ROWS))["loss"]
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def _two_outputs_together(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    output = model(rows(ROWS))
    (output["loss"] + 3 * output["early"]).backward()


def _two_outputs_apart(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    output = model(rows(ROWS))
    output["early"].backward(retain_graph=True)
    output["loss"].backward()


def _an_early_output_alone(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model(rows(ROWS))["early"].backward()


def _a_block_called_twice(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.order = (0, 1, 0)
    model(rows(ROWS))["loss"].backward()


def _a_block_called_twice_in_a_row(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.order = (0, 0, 1)
    model(rows(ROWS))["loss"].backward()


def _a_block_called_without_gradients(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.frozen_call = True
    model(rows(ROWS))["loss"].backward()


def _frozen_after_a_step(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model(rows(ROWS))["loss"].backward()
    model.zero_grad()
    model.blocks[0].weight.requires_grad_(False)
    model.last.weight.requires_grad_(False)
    model(rows(ROWS))["loss"].backward()


def _trained_after_a_step(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.blocks[0].weight.requires_grad_(False)
    model(rows(ROWS))["loss"].backward()
    model.blocks[0].weight.requires_grad_(True)
    model(rows(ROWS))["loss"].backward()


def _a_block_that_is_frozen(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.blocks[1].requires_grad_(False)
    for _ in range(2):
        model(rows(ROWS))["loss"].backward()


def _gradients_that_come_twice_in_a_pass(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.recomputes = True
    for _ in range(2):
        model(rows(ROWS))["loss"].backward()


def _values_changed_between_steps(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model(rows(ROWS))["loss"].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model(rows(ROWS))["loss"].backward()


def _in_evaluation_mode_and_back(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    model.eval()
    with torch.inference_mode():
        model(rows(ROWS))
    model.train()
    model(rows(ROWS))["loss"].backward()


PROGRAMS: list[Program] = [
    _evaluation_in_between, _two_forwards_first, _two_forwards_last_first, _one_graph_twice,
    _two_outputs_together, _two_outputs_apart, _an_early_output_alone, _a_block_called_twice,
    _a_block_called_twice_in_a_row, _a_block_called_without_gradients, _frozen_after_a_step,
    _trained_after_a_step, _values_changed_between_steps, _in_evaluation_mode_and_back,
    _a_block_that_is_frozen, _gradients_that_come_twice_in_a_pass,
]  # fmt: skip


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def check(in_threads: InThreads, program: Program, constraints: dict[str, Any]) -> None:
    """Compare the gradients that a program leaves on ranks with those on one device."""
    plan = with_constraints(ParallelPlan(), constraints)
    world = plan.data_parallel.size
    expected, models = net(), [net() for _ in range(world)]
    program(expected, lambda rows: rows)

    def run(rank: int) -> Grads:
        model = parallelize(plan, models[rank])
        program(model, lambda rows: rows.chunk(world)[rank])
        found: Grads = {}
        for name, parameter in model.named_parameters():
            found[name] = None if parameter.grad is None else parameter.grad.full_tensor()
        return found

    for got in in_threads(world, run):
        for name, parameter in expected.named_parameters():
            grad = got[name]
            assert (grad is None) == (parameter.grad is None), name
            if grad is not None and parameter.grad is not None:
                # The mean of the parts is the mean of the whole up to rounding.
                assert torch.allclose(grad, parameter.grad, rtol=0, atol=1e-12), name


@pytest.mark.by_day(
    "two_forwards_first-1",
    "one_graph_twice-0",
    "two_outputs_together-2",
    "two_outputs_apart-0",
    "two_outputs_apart-3",
    "an_early_output_alone-0",
    "a_block_called_twice-2",
    "a_block_called_without_gradients-0",
    "frozen_after_a_step-0",
    "trained_after_a_step-0",
    "a_block_that_is_frozen-1",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_gradients_are_those_of_one_device(
    in_threads: InThreads, program: Program, stage: int
) -> None:
    check(in_threads, program, {"data_parallel.size": 2, "data_parallel.zero_stage": stage})


@pytest.mark.by_day("_two_forwards_first-0")
@pytest.mark.parametrize("shares_state", [0, 1])
@pytest.mark.parametrize(
    "program", [_two_forwards_first, _a_block_called_twice, _values_changed_between_steps]
)
def test_shards_that_are_replicated_too(
    in_threads: InThreads, program: Program, shares_state: int
) -> None:
    constraints = {
        "data_parallel.size": 4,
        "data_parallel.replicate_size": 2,
        "data_parallel.replicate_zero_stage": shares_state,
        "data_parallel.zero_stage": 3,
    }
    check(in_threads, program, constraints)
