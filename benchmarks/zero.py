"""CPU time and peak memory of data and tensor parallelism, beside torch and accelerate.

    python benchmarks/zero.py [--ranks 2] [--steps 6] [--repeats 3] [--only "ZeRO 3" ...]

Trains a Llama of 25 million parameters with AdamW. Every contender runs in processes of its own,
so that its peak of memory is its own: gloo, one thread a rank. Contenders alternate; figures are
medians over repeats, of the mean over ranks. CPU time is user and system time of a step; memory is
the peak of resident memory, and how far that is above what imports took. Prints JSON; ``ratio``
is to the best peer of the same kind (``PEERS``). ``loss`` tells that all train alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

import vescale

Batch = dict[str, Tensor]
Trained = tuple[nn.Module, torch.optim.Optimizer]

# What each of ours is compared with: what keeps as little of the state of training on a rank.
PEERS = {
    "vescale ZeRO 0": ("torch DDP", "accelerate DDP"),
    "vescale ZeRO 1": ("torch ZeroRedundancyOptimizer",),
    "vescale ZeRO 2": ("torch FSDP2, gathered once",),
    "vescale ZeRO 3": ("torch FSDP2",),
    "vescale hybrid": ("torch HSDP",),
    "vescale TP": ("torch TP",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="parts of the contenders' names")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run(options.contender, options.steps)
        return
    names = [
        name
        for name in contenders(options.ranks)
        if not options.only or any(part in name for part in options.only)
    ]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            runs[name].append(started(name, options.ranks, options.steps))
    print(json.dumps({"ranks": options.ranks, "torch": torch.__version__} | told(runs), indent=2))


def started(name: str, ranks: int, steps: int) -> dict[str, float]:
    """Run a contender in processes of its own; return its figures."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", __file__, f"--contender={name}", f"--steps={steps}"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def told(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of every contender, and ours next to the best peer's."""
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 4) for key in each[0]}
        for name, each in runs.items()
    }
    ratios: dict[str, dict[str, float]] = {}
    for name, peers in PEERS.items():
        beside = [medians[peer] for peer in peers if peer in medians]
        if name in medians and beside:
            ratios[name] = {
                key: round(medians[name][key] / min(peer[key] for peer in beside), 3)
                for key in medians[name]
                if key != "loss"
            }
    return {"contenders": medians, "ratio": ratios}


def run(name: str, steps: int) -> None:
    """Train as one rank of a contender; rank 0 prints its figures as JSON."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    imported = resident()
    model, optimizer = contenders(dist.get_world_size())[name]()
    parts = 1 if name == "one device" or name.endswith("TP") else dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    loss, cpu = torch.zeros(()), 0.0
    for index in range(steps + 1):  # the first one warms up
        if index == 1:
            cpu = time.process_time()
        ids_BS = torch.randint(0, 4096, (4, 64), generator=generator)
        ids_BS = ids_BS.chunk(parts)[dist.get_rank() % parts]
        loss = model({"input_ids": ids_BS, "labels": ids_BS})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    spent = (time.process_time() - cpu) / steps * 1e3
    peak = resident("VmHWM")
    figures = torch.tensor([spent, peak, peak - imported, float(loss.detach())])
    dist.all_reduce(figures)
    keys = ("cpu_ms_per_rank_step", "peak_mb", "peak_mb_above_imports", "loss")
    if dist.get_rank() == 0:
        means = (figures / dist.get_world_size()).tolist()
        print(json.dumps(dict(zip(keys, means, strict=True))), flush=True)
    dist.barrier()
    os._exit(0)  # DDP sometimes does not come to an end here


def resident(key: str = "VmRSS") -> float:
    """Return the resident memory of this process in MB; ``VmHWM`` is its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1e3


class Net(nn.Module):
    """A Llama of 25 million parameters that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=6,
            num_attention_heads=8,
            vocab_size=4096,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss


def contenders(ranks: int) -> dict[str, Callable[[], Trained]]:
    """Return what is compared; each makes a fresh model and its optimizer."""
    found: dict[str, Callable[[], Trained]] = {
        "one device": lambda: with_optimizer(fresh()),
        "torch DDP": lambda: with_optimizer(DistributedDataParallel(fresh())),
        "accelerate DDP": accelerated,
        "vescale ZeRO 0": lambda: ours(ranks, 0),
        "torch ZeroRedundancyOptimizer": zero_redundancy,
        "vescale ZeRO 1": lambda: ours(ranks, 1),
        "torch FSDP2, gathered once": lambda: fsdp2((ranks,), reshards=False),
        "vescale ZeRO 2": lambda: ours(ranks, 2),
        "torch FSDP2": lambda: fsdp2((ranks,)),
        "vescale ZeRO 3": lambda: ours(ranks, 3),
    }
    found["torch TP"] = lambda: torch_tensor_parallel(ranks)
    found["vescale TP"] = lambda: parallelized({"tensor_parallel.size": ranks})
    if ranks % 2 == 0 and ranks > 2:
        found["torch HSDP"] = lambda: fsdp2((2, ranks // 2))
        found["vescale hybrid"] = lambda: ours(ranks, 3, copies=2)
    return found


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_optimizer(model: nn.Module) -> Trained:
    return model, adamw(model)


def ours(ranks: int, zero_stage: int, copies: int = 1) -> Trained:
    constraints: dict[str, Any] = {
        "data_parallel.size": ranks,
        "data_parallel.zero_stage": zero_stage,
    }
    if copies > 1:
        constraints["data_parallel.shard_size"] = ranks // copies
    return parallelized(constraints)


def parallelized(constraints: dict[str, Any]) -> Trained:
    model = fresh()
    plan = vescale.generate_plan(model, constraints)
    return vescale.parallelize(plan, model, adamw)


def torch_tensor_parallel(ranks: int) -> Trained:
    """Cut linear layers by column and by row; the embedding and norms are whole on every rank."""
    styles: dict[str, Any] = {"model.lm_head": ColwiseParallel(output_layouts=Replicate())}
    layer = "model.model.layers.*"
    styles |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    styles |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    styles |= {
        f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    model = parallelize_module(fresh(), init_device_mesh("cpu", (ranks,)), styles)
    # torch's foreach loops take no lists of plain tensors and DTensors.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def accelerated() -> Trained:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(*with_optimizer(fresh()))


def zero_redundancy() -> Trained:
    model = DistributedDataParallel(fresh())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
    )
    return model, optimizer


def fsdp2(mesh_shape: Sequence[int], *, reshards: bool = True) -> Trained:
    model: Any = fresh()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    for block in model.model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return with_optimizer(model)


if __name__ == "__main__":
    main()
