"""A step of layers cut by hand, on torch's DTensor and on ours in turn: time and collectives.

    python benchmarks/dtensor_step.py [--ranks 2] [--steps 10] [--repeats 3]

Normalized feed-forward layers on a residual stream, the wide weights cut by columns and the narrow
ones by rows, as in Megatron-LM; the table of embeddings is cut by rows in "table cut". Starts its
own ranks: gloo, one thread each. CPU time is that of the process, user and system. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (as torch's own counters)

import vescale_dtensor

Weights = dict[str, Tensor]
LAYERS, WIDTH, INNER, VOCABULARY = 4, 128, 384, 512
CUT: dict[str, Placement] = {"gate": Shard(1), "up": Shard(1), "down": Shard(0)}


class Collectives(TorchDispatchMode):
    """Counts collectives, whichever way they are called.

    Attributes:
        count: How many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each in DISTRIBUTED for each in types):
            return NotImplemented  # the operators on parts are to be seen
        self.count += func.namespace in {"c10d", "_c10d_functional"} and "wait" not in func.name()
        return func(*args, **kwargs or {})


DISTRIBUTED = (torch_dtensor.DTensor, vescale_dtensor.DTensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone")
        ranks = f"--nproc-per-node={options.ranks}"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, ranks, *sys.argv]
        sys.exit(subprocess.run(command, env=env, check=False).returncode)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (options.ranks,))
    results: dict[str, Any] = {"ranks": options.ranks, "torch": torch.__version__}
    for name, table in (("table whole", Replicate()), ("table cut", Shard(0))):
        results[name] = compare({**CUT, "table": table}, mesh, options.steps, options.repeats)
    if dist.get_rank() == 0:
        print(json.dumps(results, indent=2))
    dist.destroy_process_group()


def compare(
    cut: dict[str, Placement], mesh: DeviceMesh, steps: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Return the figures of each contender; they alternate."""
    expected = loss_of(weights_of(None, cut, mesh), torch.arange(VOCABULARY).view(4, -1))
    times: dict[str, list[float]] = {"torch": [], "ours": []}
    found: dict[str, dict[str, Any]] = {"torch": {}, "ours": {}}
    for _ in range(repeats):
        for name, library in (("torch", torch_dtensor), ("ours", vescale_dtensor)):
            weights = weights_of(library, cut, mesh)
            ids: Any = torch.arange(VOCABULARY).view(4, -1)
            ids = library.distribute_tensor(ids, mesh, [Replicate()])
            try:
                with Collectives() as sent:
                    loss = step(weights, ids)
            except (AssertionError, RuntimeError) as error:
                found[name] = {"error": f"{type(error).__name__} {error}"[:90]}
                continue
            start = time.process_time()
            for _ in range(steps):
                step(weights, ids)
            times[name].append((time.process_time() - start) / steps * 1e3)
            found[name] = {
                "cpu_ms_per_rank_step": round(statistics.median(times[name]), 1),
                "collectives_per_step": sent.count,
                "relative_loss_difference": abs(loss - float(expected)) / float(expected),
            }
    return found


def weights_of(library: Any, cut: dict[str, Placement], mesh: DeviceMesh) -> Weights:
    """Return the parameters: plain if there is no library."""
    torch.manual_seed(0)
    made: Weights = {"table": torch.randn(VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        made[f"gain{layer}"] = torch.ones(WIDTH)
        made[f"gate{layer}"] = torch.randn(WIDTH, INNER) / WIDTH**0.5
        made[f"up{layer}"] = torch.randn(WIDTH, INNER) / WIDTH**0.5
        made[f"down{layer}"] = torch.randn(INNER, WIDTH) / INNER**0.5
    if library is not None:
        for name, weight in made.items():
            placement = cut.get(name.rstrip("0123456789"), Replicate())
            made[name] = library.distribute_tensor(weight, mesh, [placement])
    return {name: weight.requires_grad_() for name, weight in made.items()}


def loss_of(weights: Weights, ids: Tensor) -> Tensor:
    """Return a loss of the layers' output."""
    x = F.embedding(ids, weights["table"])
    for layer in range(LAYERS):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        inner = weights[f"gain{layer}"] * (x * scale)
        gate, up = inner @ weights[f"gate{layer}"], inner @ weights[f"up{layer}"]
        x = x + (F.silu(gate) * up) @ weights[f"down{layer}"]
    return x.pow(2).mean()


def step(weights: Weights, ids: Tensor) -> float:
    """Compute the loss and the gradients; return the loss."""
    loss = loss_of(weights, ids)
    loss.backward()
    for weight in weights.values():
        weight.grad = None
    whole: Any = loss.detach()
    return float(whole.full_tensor())


if __name__ == "__main__":
    main()
