"""One training step under several plans, beside torch's DDP and FSDP2, in one run.

    python benchmarks/step.py [--ranks 2] [--steps 6] [--repeats 3]

Starts its own ranks: gloo, one thread each. Contenders alternate; figures are medians over
repeats. The figure to compare on a machine with few cores is the CPU time a rank spends per
step: process CPU, user and system. Prints JSON, with the largest relative difference of a
loss to one device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

import vescale

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]


class Net(nn.Module):
    """A Llama of 8 million parameters that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=8,
            vocab_size=512,
            use_cache=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone")
        ranks = f"--nproc-per-node={options.ranks}"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, ranks, *sys.argv]
        sys.exit(subprocess.run(command, env=env, check=False).returncode)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    results = measure(options.steps, options.repeats)
    if dist.get_rank() == 0:
        print(json.dumps(results, indent=2))
    dist.destroy_process_group()


def measure(steps: int, repeats: int) -> dict[str, Any]:
    """Return each contender's figures, by name."""
    reference = train(one_device(fresh()), steps)[0]
    figures: dict[str, list[tuple[float, float]]] = {}
    differences: dict[str, float] = {}
    for _ in range(repeats):
        for name, make in contenders(dist.get_world_size()).items():
            losses, cpu_ms, wall_ms = train(make(), steps)
            figures.setdefault(name, []).append((cpu_ms, wall_ms))
            differences[name] = max(
                abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)
            )
    return {
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "contenders": {
            name: {
                "cpu_ms_per_rank_step": round(statistics.median(c for c, _ in runs), 1),
                "wall_ms_per_step": round(statistics.median(w for _, w in runs), 1),
                "largest_relative_loss_difference": differences[name],
            }
            for name, runs in figures.items()
        },
    }


def train(step: Step, steps: int) -> tuple[list[float], float, float]:
    """Return (losses, CPU ms of a rank per step, wall ms per step); the first step warms up."""
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    cpu = wall = 0.0
    for index in range(steps + 1):
        ids_BS = torch.randint(0, 512, (8, 64), generator=generator)
        if index == 1:
            cpu, wall = time.process_time(), time.perf_counter()
        losses.append(step({"input_ids": ids_BS, "labels": ids_BS}))
    spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall]) / steps * 1e3
    dist.all_reduce(spent)
    cpu_ms, wall_ms = (spent / dist.get_world_size()).tolist()
    return losses, cpu_ms, wall_ms


def contenders(ranks: int) -> dict[str, Callable[[], Step]]:
    """Return what is compared; each makes a fresh model."""

    def dp(zero_stage: int) -> Callable[[], Step]:
        return lambda: ours({"data_parallel.size": ranks, "data_parallel.zero_stage": zero_stage})

    return {
        "one device": lambda: one_device(fresh()),
        "torch DDP": lambda: torch_data_parallel(DistributedDataParallel(fresh())),
        "vescale DP": dp(0),
        "vescale ZeRO 1": dp(1),
        "torch FSDP2": torch_fsdp2,
        "vescale ZeRO 3": dp(3),
        "vescale TP": lambda: ours({"tensor_parallel.size": ranks}),
        "vescale PP": lambda: ours(
            {"pipeline_parallel.size": ranks, "pipeline_parallel.microbatches": 2 * ranks}
        ),
    }


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_device(model: nn.Module) -> Step:
    return stepper(model, optimizer_of(model), parts=1)


def ours(constraints: dict[str, Any]) -> Step:
    model = fresh()
    plan = vescale.generate_plan(model, constraints)
    model, optimizer = vescale.parallelize(plan, model, optimizer_of)
    return stepper(model, optimizer, parts=plan.data_parallel.size)


def torch_data_parallel(model: nn.Module) -> Step:
    step = stepper(model, optimizer_of(model), parts=dist.get_world_size())

    def averaged(batch: Batch) -> float:
        loss = torch.tensor(step(batch))
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    return averaged


def torch_fsdp2() -> Step:
    model: Any = fresh()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_data_parallel(model)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, *, parts: int) -> Step:
    """Return the loop body of one device, on this rank's part of the batch."""

    def step(batch: Batch) -> float:
        part = {key: x.chunk(parts)[dist.get_rank() % parts] for key, x in batch.items()}
        loss = model(part)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    main()
