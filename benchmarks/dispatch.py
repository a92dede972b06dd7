"""What an operator on distributed tensors costs the host, beside torch's own DTensor.

Prints one JSON object. One process plays rank 0 of a mesh of which nobody else exists, so what is
measured is dispatch and not communication. Every operator runs plain, on torch's DTensor and on
ours in turn; times are medians over rounds, microseconds a call.

    python benchmarks/dispatch.py [--rounds 9] [--calls 1000]
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 (as torch's tests)

import vescale_dtensor

Program = Callable[[], object]
Distribute = Callable[[Tensor, Sequence[Placement]], Tensor]

# Optimizers call it; torch does not export it.
foreach_add: Any = vars(torch)["_foreach_add_"]


def programs(distribute: Distribute) -> dict[str, tuple[Program, bool]]:
    """Return what is timed, and whether autograd records it."""

    def make(*shape: int, placements: Sequence[Placement], grad: bool = False) -> Tensor:
        return distribute(torch.randn(shape), placements).detach().requires_grad_(grad)

    rows: Sequence[Placement] = [Shard(0)]
    columns: Sequence[Placement] = [Shard(1)]
    whole: Sequence[Placement] = [Replicate()]
    x = make(32, 32, placements=rows)
    w = make(32, 32, placements=whole)
    heads = make(4, 8, 16, 8, placements=columns)
    activations = make(4, 16, 32, placements=rows)
    ids = distribute(torch.randint(0, 32, (4, 16)), rows)
    trained = make(32, 32, placements=rows, grad=True)
    weight = make(64, 32, placements=rows, grad=True)
    gain, bias = make(32, placements=whole), make(32, placements=whole)
    parameters = [make(8, 8, placements=rows) for _ in range(50)]

    def linear_forward_and_backward() -> None:
        F.linear(trained.detach().requires_grad_(), weight).sum().backward()

    return {
        "add": (lambda: x + x, False),
        "add, one whole": (lambda: x + w, False),
        "mul by a number": (lambda: x * 2.0, False),
        "add_": (lambda: x.add_(0.0), False),
        "addcmul_, by a number": (lambda: x.addcmul_(x, x, value=0.0), False),
        "relu": (lambda: torch.relu(x), False),
        "relu, recorded": (lambda: torch.relu(trained), True),
        "mm": (lambda: x @ w, False),
        "linear": (lambda: F.linear(activations, w, gain), False),
        "linear, forward and backward": (linear_forward_and_backward, True),
        "view": (lambda: activations.view(4, 16, 8, 4), False),
        "reshape to 2-D": (lambda: activations.reshape(64, 32), False),
        "transpose": (lambda: activations.transpose(1, 2), False),
        "slice": (lambda: activations[:, 2:6], False),
        "detach": (lambda: x.detach(), False),
        "softmax": (lambda: torch.softmax(x, -1), False),
        "layer_norm": (lambda: F.layer_norm(activations, (32,), gain, bias), False),
        "embedding": (lambda: F.embedding(ids, w), False),
        "sum": (lambda: x.sum(), False),
        "sum over a dim": (lambda: x.sum(1), False),
        "bmm": (lambda: heads.flatten(0, 1) @ heads.flatten(0, 1).transpose(1, 2), False),
        "foreach add of 50": (lambda: foreach_add(parameters, 0.0), False),
    }


def microseconds(program: Program, recorded: bool, calls: int) -> float:
    with torch.set_grad_enabled(recorded):
        start = time.process_time()
        for _ in range(calls):
            program()
        return (time.process_time() - start) / calls * 1e6


def first_call(distribute: Distribute, placements: Sequence[Placement]) -> float:
    """Return the median cost of a matrix product of sizes that were not seen before."""
    seconds: list[float] = []
    for size in range(40, 56):
        a = distribute(torch.randn(size, size), placements)
        b = distribute(torch.randn(size, size), [Replicate()] * len(placements))
        start = time.process_time()
        torch.matmul(a, b)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure dispatch beside torch's DTensor.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (4,))
    sides = {
        "plain": programs(lambda tensor, _: tensor),
        "torch": programs(lambda t, p: torch_dtensor.distribute_tensor(t, mesh, p)),
        "ours": programs(lambda t, p: vescale_dtensor.distribute_tensor(t, mesh, p)),
    }
    rounds: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in sides} for name in sides["plain"]
    }
    for number in range(options.rounds + 1):
        for name, times in rounds.items():
            for side, known in sides.items():
                calls = options.calls if number else 20
                taken = microseconds(*known[name], calls)
                if number:
                    times[side].append(taken)
    cube = init_device_mesh("cpu", (2, 2, 2))
    placed = [Shard(0), Replicate(), Replicate()]
    medians = {
        name: {side: round(statistics.median(times), 2) for side, times in sided.items()}
        for name, sided in rounds.items()
    }
    ratios = {name: each["ours"] / each["torch"] for name, each in medians.items()}
    result = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "microseconds": medians,
        "ours_over_torch": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "geometric_mean_ours_over_torch": round(statistics.geometric_mean(ratios.values()), 3),
        "first_call_microseconds_on_3_axes": {
            "torch": round(
                first_call(lambda t, p: torch_dtensor.distribute_tensor(t, cube, p), placed)
            ),
            "ours": round(
                first_call(lambda t, p: vescale_dtensor.distribute_tensor(t, cube, p), placed)
            ),
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
