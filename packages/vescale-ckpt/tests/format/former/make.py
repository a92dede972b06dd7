"""Writes the checkpoints in this folder, which later versions have to go on reading.

    torchrun --nproc-per-node 2 make.py DIRECTORY

They were written by vescale-ckpt 0.1.0, format version 2, and are not to be written again: a new
version of the format gets checkpoints of its own beside them.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt

LAYOUTS = ("shared", "per_rank")


def numbers(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> torch.Tensor:
    """Return values that every version of torch computes alike."""
    numel = torch.Size(shape).numel()
    return torch.arange(first, first + numel).remainder(97).to(dtype).reshape(shape)


def sharded(full: torch.Tensor, placement: Placement) -> DTensor:
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [placement])


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for index, parameter in enumerate(parameters):
        moments = optimizer.state[parameter]
        with torch.no_grad():
            for name, first in (("exp_avg", 3), ("exp_avg_sq", 5)):
                moments[name] = sharded_like(parameter, first + index)
    return optimizer


def sharded_like(parameter: torch.Tensor, first: int) -> torch.Tensor:
    full = numbers(tuple(parameter.shape), parameter.dtype, first)
    if isinstance(parameter, DTensor):
        return distribute_tensor(full, parameter.device_mesh, parameter.placements)
    return full


def state(rank: int) -> dict[str, Any]:
    """Return what was saved: the values of one rank, the shards of the default group's."""
    weight = nn.Parameter(sharded(numbers((7, 6), torch.float32, 1), Shard(0)))
    bias = nn.Parameter(sharded(numbers((6,), torch.bfloat16, 2), Replicate()))
    tied = numbers((3,), torch.float64, 3)
    optimizer = optimizer_of([weight, bias])
    with torch.no_grad():  # the step has changed them
        weight.copy_(sharded(numbers((7, 6), torch.float32, 1), Shard(0)))
        bias.copy_(sharded(numbers((6,), torch.bfloat16, 2), Replicate()))
    return {
        "model": OrderedDict(
            {
                "weight": weight,
                "bias": bias,
                "columns": sharded(numbers((5, 9), torch.bfloat16, 11), Shard(1)),
                "tied": [tied, tied],
                "scalar": torch.tensor(7, dtype=torch.int32),
                "empty": torch.empty((0, 4), dtype=torch.float16),
                "mask": numbers((5,), torch.int64, 0) % 2 == 0,
                "complex": numbers((2, 2), torch.complex64, 4),
            }
        ),
        "optimizer": optimizer,
        "own": vescale_ckpt.PerRank(
            {"words": numbers((3,), torch.int64, 10 * rank), "order": [rank, "x"]}
        ),
        "same": vescale_ckpt.PerRank((numbers((2,), torch.uint8, 1), 7)),
        "values": {
            "plain": [None, True, -(1 << 80), 0.1, "text", "$dollar", "snow \u2603"],
            "odd": [float("inf"), float("-inf")],
            "pair": (1, (2,)),
            "size": torch.Size((3, 4)),
            "keys": {1: "one", "two": 2, "$": 3},
            "ordered": OrderedDict([("b", 1), ("a", 2)]),
            "default": defaultdict(int, {"x": 1}),
            "counter": Counter("aab"),
            "nested": {"a": {"b": [{"c": numbers((4,), torch.int16, 1)}, {}, []]}},
        },
        "step": 1000,
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in LAYOUTS:
        vescale_ckpt.save(
            Path(sys.argv[1]) / name,
            state(dist.get_rank()),
            layout=name,
        )
    dist.destroy_process_group()
