"""CPU time and peak memory of data and tensor parallelism, beside torch, accelerate and DeepSpeed.

    python benchmarks/zero.py [--ranks 2] [--steps 6] [--repeats 3] [--only "ZeRO 3" ...]

Trains a Llama of 25 million parameters with AdamW. Every contender runs in processes of its own,
so that its peak of memory is its own: gloo, one thread a rank. Contenders alternate; figures are
medians over repeats, of the mean over ranks. CPU time is user and system time of a step; memory is
the peak of resident memory, and how far that is above what imports took. Prints JSON; ``ratio``
is to the best peer of the same kind (``PEERS``). ``loss`` tells that all train alike. Operators
and collectives are those that one more step dispatches.

accelerate and DeepSpeed take part where they are installed; what is not is told on stderr.
DeepSpeed's collectives are gloo's, as all others are: those through shared memory, which it
compiles at its first start, are switched off. ``pip install deepspeed`` with ``DS_BUILD_OPS=0``.

Most of a run is starting its ranks: four of FSDP2 that take one step need 80 seconds of CPU time,
6 of them for steps. Nine runs, of three contenders, are six minutes of two idle processors.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from side_by_side.contenders import (
    Trained,
    adamw,
    alternated,
    begun,
    chosen,
    counted,
    end,
    fresh,
    random_ids,
    timed,
    told,
    with_optimizer,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import vescale

# What the first word of a contender's name has to have installed.
PACKAGES = {"accelerate": "accelerate", "DeepSpeed": "deepspeed"}
# What each of ours is compared with: what keeps as little of the state of training on a rank.
PEERS = {
    "vescale ZeRO 0": ("torch DDP", "accelerate DDP", "DeepSpeed ZeRO 0"),
    "vescale ZeRO 1": ("torch ZeroRedundancyOptimizer", "DeepSpeed ZeRO 1"),
    "vescale ZeRO 2": ("torch FSDP2, gathered once", "DeepSpeed ZeRO 2"),
    "vescale ZeRO 3": ("torch FSDP2", "DeepSpeed ZeRO 3"),
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
    names = [name for name in chosen([*contenders(options.ranks)], options.only) if is_there(name)]
    medians = alternated(
        __file__, names, options.ranks, options.repeats, [f"--steps={options.steps}"]
    )
    heading = {"ranks": options.ranks, "torch": torch.__version__}
    print(json.dumps(heading | told(medians, PEERS), indent=2))


def run(name: str, steps: int) -> None:
    """Train as one rank of a contender; rank 0 prints its figures as JSON."""
    if (package := package_of(name)) is not None:
        importlib.import_module(package)  # imports are no memory of training
    imported = begun()
    model, optimizer = contenders(dist.get_world_size())[name]()
    parts = 1 if name == "one device" or name.endswith("TP") else dist.get_world_size()
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        ids_BS = random_ids(generator, 4, 64).chunk(parts)[dist.get_rank() % parts]
        loss = model({"input_ids": ids_BS, "labels": ids_BS})
        backward(model, loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    figures = timed(step, steps, imported)
    end(figures | counted(step))


def package_of(name: str) -> str | None:
    return PACKAGES.get(name.split()[0])


def is_there(name: str) -> bool:
    """Whether a contender can run; says on stderr why not."""
    package = package_of(name)
    found = package is None or importlib.util.find_spec(package) is not None
    if not found:
        print(f"{name}: left out, {package} is not installed", file=sys.stderr)
    return found


def backward(model: Any, loss: torch.Tensor) -> None:
    """Compute gradients, as a contender would have it."""
    if type(model).__module__.startswith("deepspeed."):
        model.backward(loss)
    else:
        loss.backward()


def contenders(ranks: int) -> dict[str, Callable[[], Trained]]:
    """Return what is compared; each makes a fresh model and its optimizer."""
    found: dict[str, Callable[[], Trained]] = {
        "one device": lambda: with_optimizer(fresh()),
        "torch DDP": lambda: with_optimizer(DistributedDataParallel(fresh())),
        "accelerate DDP": accelerated,
        "DeepSpeed ZeRO 0": lambda: deepspeed(ranks, 0),
        "vescale ZeRO 0": lambda: ours(ranks, 0),
        "torch ZeroRedundancyOptimizer": zero_redundancy,
        "DeepSpeed ZeRO 1": lambda: deepspeed(ranks, 1),
        "vescale ZeRO 1": lambda: ours(ranks, 1),
        "torch FSDP2, gathered once": lambda: fsdp2((ranks,), reshards=False),
        "DeepSpeed ZeRO 2": lambda: deepspeed(ranks, 2),
        "vescale ZeRO 2": lambda: ours(ranks, 2),
        "torch FSDP2": lambda: fsdp2((ranks,)),
        "DeepSpeed ZeRO 3": lambda: deepspeed(ranks, 3),
        "vescale ZeRO 3": lambda: ours(ranks, 3),
    }
    found["torch TP"] = lambda: torch_tensor_parallel(ranks)
    found["vescale TP"] = lambda: parallelized({"tensor_parallel.size": ranks})
    if ranks % 2 == 0 and ranks > 2:
        found["torch HSDP"] = lambda: fsdp2((2, ranks // 2))
        found["vescale hybrid"] = lambda: ours(ranks, 3, copies=2)
    return found


def ours(ranks: int, zero_stage: int, copies: int = 1) -> Trained:
    constraints: dict[str, Any] = {
        "data_parallel.size": ranks,
        "data_parallel.zero_stage": zero_stage,
    }
    if copies > 1:
        constraints["data_parallel.replicate_size"] = copies
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


def deepspeed(ranks: int, stage: int) -> Trained:
    import deepspeed  # pyright: ignore[reportMissingImports]: where it is installed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4 // ranks,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
    }
    model, optimizer = with_optimizer(fresh())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, EngineSteps(engine)


class EngineSteps(torch.optim.Optimizer):
    """Steps of an engine of DeepSpeed, which lets go of gradients itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: no loss
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""


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
