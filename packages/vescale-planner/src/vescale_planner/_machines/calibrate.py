"""What this machine reaches, measured: products, attention, memory and collectives.

And what of a rank's memory holds no tensors, for it has its libraries and communicators by then.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Rows and columns of what is multiplied: narrow, usual and wide.
_WIDTHS = (64, 128, 256, 512, 1024)
_ROWS = 512
_ROUNDS, _REPEATS = 3, 10
_SPAN = 0.1  # seconds of a round: many turns of a processor that ranks share
_FEW_BYTES, _MANY_BYTES = 2**10, 2**23


def measured() -> dict[str, Any]:
    """Return fields of a ``Cluster`` as they are here, the slowest rank's where ranks differ.

    Every rank of the default process group must call this, if there is one. All measure at the
    same time, so that what they share is shared as in a step. It takes some seconds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    fields: dict[str, Any] = {}
    peaks: dict[int, float] = {}
    for dtype in dtypes:
        peaks[dtype.itemsize], fields["half_width"] = _products(dtype, device)
    fields["memory_bytes_per_second"] = memory = _memory(device)
    fields["memory_efficiency"] = min(1.0, _element_wise(dtypes[-1], device) / memory)
    peak = peaks[dtypes[-1].itemsize]
    fields["attention_efficiency"] = min(1.0, _attention(dtypes[-1], device) / peak)
    fields["launch_seconds"] = _launch(device)
    fields["alone_speed"] = _alone_speed(device)
    fields |= _links(device)
    if (reserved := _reserved(device)) is not None:
        fields["reserved_bytes"] = round(_most(reserved, device))
    # What is measured is what is reached.
    return fields | {"flops_per_second": peaks, "efficiency": 1.0, "link_efficiency": 1.0}


def fitted_rate(widths: list[int], rates: list[float]) -> tuple[float, float]:
    """Return the rate of wide products, and the width that reaches half of it.

    Of ``rate = peak * k / (k + half)`` the inverse is a line in ``1 / k``.
    """
    slope, intercept = np.polyfit([1 / width for width in widths], [1 / r for r in rates], 1)
    peak = 1 / intercept if intercept > 0 else max(rates)
    return float(max(peak, max(rates))), float(max(0.0, slope * peak))


def _products(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    rates: list[float] = []
    for width in _WIDTHS:
        left = torch.randn(_ROWS, width, device=device).to(dtype)
        right = torch.randn(width, width, device=device).to(dtype)
        taken = _seconds(lambda a=left, b=right: a @ b, device)
        rates.append(2 * _ROWS * width * width / taken)
    return fitted_rate([*_WIDTHS], rates)


def _attention(dtype: torch.dtype, device: torch.device) -> float:
    """Return the flops a second of attention, forward and backward, all scores counted."""
    heads, length, width = 8, 256, 64
    shape = 1, heads, length, width
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def there_and_back() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    # Two products forward, five backward, as they are priced.
    return 7 * 2 * heads * length * length * width / _seconds(there_and_back, device)


def _memory(device: torch.device) -> float:
    """Return the bytes a second of an element-wise operator that fits into no cache."""
    x = torch.ones(2**24, device=device)
    y = torch.ones_like(x)
    return 3 * x.nbytes / _seconds(lambda: x.add_(y), device)


def _element_wise(dtype: torch.dtype, device: torch.device) -> float:
    """Return the bytes a second of a block's and a loss's operators beside products.

    They write memory that is new, and compute exponentials: on processors they reach a fifth of
    what adding in place does. The bytes are those that are priced: what forward keeps is written
    and read, in each direction.
    """
    width = _WIDTHS[-1]
    rows = 2**16 if device.type == "cuda" else 2**10  # starting operators takes no part of it
    x, gate = (torch.randn(rows, width, device=device).to(dtype).requires_grad_() for _ in "xg")
    classes = torch.zeros(rows, dtype=torch.int64, device=device)
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    def forward() -> Tensor:
        hidden = F.silu(F.layer_norm(x, (width,))) * gate + x
        return F.cross_entropy(hidden, classes)

    with saved_tensors_hooks(keep, lambda saved: saved):
        forward()
    return 4 * sum(kept.values()) / _seconds(lambda: forward().backward(), device)


def _launch(device: torch.device) -> float:
    """Return the time to start an operator of a block, as it is called and differentiated."""
    width, layers = 8, 20
    kinds = (nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())
    block = nn.Sequential(*kinds * layers).to(device)
    x = torch.ones(1, width, device=device, requires_grad=True)
    taken = _seconds(lambda: block(x).sum().backward(), device)
    return taken / (3 * len(kinds) * layers)  # backward is two


def _alone_speed(device: torch.device) -> float:
    """Return how many times as fast one rank computes while the others wait."""
    x = torch.randn(_ROWS, _ROWS, device=device)
    together = _seconds(lambda: x @ x, device)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    _most(0.0, device)
    alone = _spent(lambda: x @ x, device, lambda count, spent: spent < _SPAN) if is_first else 0.0
    return max(1.0, together / _most(alone, device))


def _links(device: torch.device) -> dict[str, float]:
    """Return latencies and speeds of all-gathers inside a node, and over all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    world = dist.get_world_size()
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    found: dict[str, float] = {"ranks_per_node": local}
    if local > 1:
        # All ranks make all groups, in one order.
        starts = range(0, world, local)
        groups = [dist.new_group([*range(start, start + local)]) for start in starts]
        latency, speed = _all_gather(groups[dist.get_rank() // local], local, device)
        found |= {"intra_latency_seconds": latency, "intra_bytes_per_second": speed}
    if world > local:
        latency, speed = _all_gather(None, world, device)
        found |= {"inter_latency_seconds": latency, "inter_bytes_per_second": speed}
    return found


def _all_gather(group: Any, ranks: int, device: torch.device) -> tuple[float, float]:
    """Return the latency of a round and the bytes a second, as they are priced."""
    taken: list[float] = []
    for nbytes in (_FEW_BYTES, _MANY_BYTES):
        own = torch.zeros(nbytes // ranks // 4 + 1, device=device)
        every = [torch.empty_like(own) for _ in range(ranks)]

        def gather(own: Tensor = own, every: list[Tensor] = every) -> None:
            dist.all_gather(every, own, group=group)

        taken.append(_collective_seconds(gather, device))
    few, many = taken
    sent = (ranks - 1) / ranks * (_MANY_BYTES - _FEW_BYTES)
    return few / math.ceil(math.log2(ranks)), sent / max(many - few, 1e-9)


def _reserved(device: torch.device) -> int | None:
    """Return the bytes that are taken, by whatever, beside torch's tensors; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    statm = Path("/proc/self/statm")
    if not statm.exists():  # Linux alone keeps that account
        return None
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a run while every rank runs the same, on the slowest rank.

    Ranks may share processors, which take turns of some milliseconds: a run between two turns
    would seem to have a processor of its own.
    """
    run()  # the first one allocates
    rounds = [_over(run, device, lambda count, spent: spent < _SPAN) for _ in range(_ROUNDS)]
    return _most(median(rounds), device)


def _collective_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a run that ranks do together: all of them, as often."""
    run()
    rounds = [_over(run, device, lambda count, spent: count < _REPEATS) for _ in range(_ROUNDS)]
    return _most(median(rounds), device)


def _over(
    run: Callable[[], object], device: torch.device, goes_on: Callable[[int, float], bool]
) -> float:
    """Return the mean time of runs, begun by all ranks at once."""
    _most(0.0, device)  # waits for the others
    return _spent(run, device, goes_on)


def _spent(
    run: Callable[[], object], device: torch.device, goes_on: Callable[[int, float], bool]
) -> float:
    count, spent, start = 0, 0.0, time.perf_counter()
    while not count or goes_on(count, spent):
        run()
        _wait(device)
        count, spent = count + 1, time.perf_counter() - start
    return spent / count


def _most(value: float, device: torch.device) -> float:
    """Return the largest value that a rank has."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
