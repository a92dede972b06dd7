"""Compiled blocks that are verified, and that share a process with those of other models."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import compile_report

from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan

COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}
WIDTH = 8


class Reads(nn.Module):
    """Reads twice what other blocks read, too: a compiler adds up its gradients of it first."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BF: Tensor, memory_BF: Tensor) -> Tensor:
        return x_BF + torch.sigmoid(self.key(memory_BF)) * self.value(memory_BF)


class Breaks(nn.Module):
    """Breaks the graph in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BF: Tensor, memory_BF: Tensor) -> Tensor:
        hidden = self.up(x_BF)
        torch._dynamo.graph_break()
        return x_BF + self.down(torch.relu(hidden))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Reads, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.remember = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BF, memory_BF = self.embed(x_BF), torch.tanh(self.remember(x_BF))
        for block in self.blocks:
            x_BF = block(x_BF, memory_BF)
        return x_BF.pow(2).mean()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


@pytest.mark.by_day("pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2, ZERO: 3}, {PP: 2, PARTS: 2}], ids=["zero3", "pp"])
def test_bits_are_those_of_one_device_whose_blocks_are_compiled(plan: Constraints) -> None:
    report = vescale.verify(make_plan({**plan, **COMPILED}), Net, batch(), steps=2)
    assert report.passed, str(report)
    assert {each.level: each.status for each in report.levels}["N3"] == "passed"


class Drops(Reads):
    def forward(self, x_BF: Tensor, memory_BF: Tensor) -> Tensor:
        return super().forward(torch.dropout(x_BF, 0.5, self.training), memory_BF)


@pytest.mark.nightly
@pytest.mark.slow
def test_micro_batches_that_draw_are_verified_beside_a_model_that_is_not_compiled() -> None:
    plan = make_plan({PP: 2, PARTS: 2, **COMPILED})
    report = vescale.verify(plan, lambda: Net(Drops), batch(), steps=2)
    assert report.passed, str(report)


@pytest.mark.nightly
def test_machine_code_has_bits_of_one_device_whose_blocks_are_compiled() -> None:
    plan = make_plan({DP: 2, ZERO: 3, "compile": "blocks"})
    report = vescale.verify(plan, Net, batch(), steps=2)
    assert report.passed, str(report)


def trained(constraints: Constraints) -> list[int]:
    """Return how many graphs the blocks of this rank have."""
    model = vescale.parallelize(make_plan({**COMPILED, **constraints}), Net(Breaks, 4))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model(batch().chunk(ranks)[rank]).backward()
    report = compile_report(model)
    assert not any(block.eager for block in report.values())
    return [block.num_graphs for block in report.values()]


@pytest.mark.nightly
def test_blocks_of_other_models_of_a_process_do_not_count() -> None:
    for _ in range(3):  # 48 blocks: torch gave code behind breaks up at the 33rd
        assert vescale.emulate(trained, 4, args=({DP: 4},)) == [[2] * 4] * 4


def of_a_model_that_is_gone(kind: type[nn.Module]) -> weakref.ref[nn.Module]:
    model = vescale.parallelize(make_plan(COMPILED), Net(kind, 2))
    model(batch()).backward()
    return weakref.ref(model.get_submodule("blocks.0"))


def freed() -> None:
    for kind in (Reads, Breaks):
        block = of_a_model_that_is_gone(kind)
        gc.collect()
        assert block() is None


@pytest.mark.nightly
def test_compiled_blocks_are_freed_with_their_model() -> None:
    vescale.emulate(freed, 1)
