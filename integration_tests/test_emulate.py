"""Ranks in one process give what ranks in processes give, to the bit, under every kind of plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import vescale
import vescale_ckpt
from vescale.cli.main import main
from vescale_parallel import with_constraints
from vescale_testing import World

from .models import ReturnsLoss, build
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .training import ROWS, samples, whole

STEPS = 3

PLANS: dict[str, tuple[str, Constraints]] = {
    "tp2": ("gpt2-dropout", {TP: 2}),
    "dp2": ("gpt2-dropout", {DP: 2}),
    "zero1": ("hand_written", {DP: 2, ZERO: 1}),
    "zero3": ("llama", {DP: 2, ZERO: 3}),
    "pp2": ("gpt2-dropout", {PP: 2, PARTS: 2}),
    "tp2-overlap": ("llama", {TP: 2, "tensor_parallel.overlap": 2}),
    "tp2-dp2": ("hand_written", {TP: 2, DP: 2}),
    "pp2-tp2": ("gpt2-dropout", {PP: 2, PARTS: 2, TP: 2}),
    "tp2-sequence-zero3": ("llama", {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3}),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name != "gpt2-dropout":
        return build(name)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=61, n_positions=64)
    return ReturnsLoss(GPT2LMHeadModel(config))


@dataclass
class Trained:
    """What one rank has seen: losses, its gradients, parameters, and where its generator is."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    generator: Tensor


def train(name: str, constraints: Constraints, saved: str = "", loaded: str = "") -> Trained:
    model = make(name)
    plan = with_constraints(vescale.ParallelPlan(), {"batch.global_size": ROWS, **constraints})
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: AdamW(m.parameters(), lr=1e-2), None, samples(STEPS, uneven=True)
    )
    state = {"model": model, "optimizer": optimizer}
    if loaded:
        vescale.load(loaded, state)
    torch.manual_seed(7)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in loader:
        with warnings.catch_warnings():
            # Under a pipeline they are not one device's; they are still those of the processes.
            warnings.filterwarnings("ignore", "forward draws random numbers")
            loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        for fqn, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{len(losses)}.{fqn}"] = whole(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
    if saved:
        vescale.save(saved, state)
    parameters = {fqn: whole(p).clone() for fqn, p in model.named_parameters()}
    return Trained(losses, gradients, parameters, torch.get_rng_state())


def assert_same(ours: list[Trained], theirs: list[Trained]) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.losses == other.losses
        assert torch.equal(own.generator, other.generator)
        for found, expected in (
            (own.gradients, other.gradients),
            (own.parameters, other.parameters),
        ):
            assert found.keys() == expected.keys()
            for fqn, tensor in expected.items():
                assert torch.equal(found[fqn], tensor), fqn


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_emulated_ranks_train_as_processes_do(world2: World, world4: World, plan: str) -> None:
    name, constraints = PLANS[plan]
    size = with_constraints(vescale.ParallelPlan(), constraints).world_size
    ours = vescale.emulate(train, size, args=(name, constraints))
    assert_same(ours, (world2 if size == 2 else world4).run(train, name, constraints))


@pytest.mark.slow
def test_what_emulated_ranks_save_processes_load(world2: World, tmp_path: Path) -> None:
    constraints = PLANS["zero3"][1]
    path = str(tmp_path / "step")
    vescale.emulate(train, 2, args=("hand_written", constraints, path))
    ours = vescale.emulate(train, 2, args=("hand_written", constraints, "", path))
    assert_same(ours, world2.run(train, "hand_written", constraints, "", path))


def save_beside(path: str) -> None:
    dist.init_process_group("gloo")
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(path, {"common": torch.arange(3.0)})


@pytest.mark.slow
def test_emulated_ranks_save_at_once_what_processes_save_beside(tmp_path: Path) -> None:
    vescale.emulate(save_beside, 2, args=(str(tmp_path / "step"),))
    state = {"common": torch.empty(3)}
    vescale.load(tmp_path / "step", state)
    assert torch.equal(state["common"], torch.arange(3.0))


@pytest.mark.slow
def test_parameters_of_all_ranks_are_there_once() -> None:
    def nbytes() -> int:
        model = make("hand_written")
        constraints = {"batch.global_size": ROWS, DP: 2, ZERO: 3}
        plan = with_constraints(vescale.ParallelPlan(), constraints)
        model = vescale.parallelize(plan, model)
        dist.barrier()
        local: Any = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        return sum(t.numel() * t.itemsize for t in local)

    whole_nbytes = sum(p.numel() * p.itemsize for p in make("hand_written").parameters())
    both = vescale.emulate(nbytes, 2)
    assert whole_nbytes <= sum(both) <= 1.1 * whole_nbytes


SCRIPT = """
import os, sys
import torch, torch.distributed as dist, vescale

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).pow(2).mean()

def train():
    torch.manual_seed(0)
    model = Net()
    plan = vescale.generate_plan(model, {"data_parallel.size": 2})
    model = vescale.parallelize(plan, model)
    print(sys.argv[1:], dist.get_rank(), os.environ["WORLD_SIZE"])
    model(torch.ones(4, 4)).backward()

if __name__ == "__main__":
    train()
"""


@pytest.mark.slow
def test_the_command_runs_a_script_for_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["emulate", "-n", "2", str(script), "--lr", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[rank 0] ['--lr', '3'] 0 2" in lines
    assert "[rank 1] ['--lr', '3'] 1 2" in lines
    assert main(["emulate", "-n", "2", str(tmp_path / "none.py")]) == 2
    assert "expected a Python file" in capsys.readouterr().err
