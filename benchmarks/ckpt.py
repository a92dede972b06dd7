"""How fast checkpoints are saved and loaded, beside the raw disk and torch's own ways.

Run ``python benchmarks/ckpt.py --ranks 2 --gigabytes 1 --directory /a/directory/on/the/disk``.
It prints one JSON object. Everything is measured in one run, alternating, because a disk is
never the same twice: read the ratios, not the gigabytes per second.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import vescale_ckpt

_REQUEST_NBYTES = 8 << 20
_PAGE_NBYTES = 4096


def state_shapes(total_nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return float32 parameters of a Llama-like model whose Adam state makes up the rest."""
    hidden, ffn = 1024, 2816
    layer = {
        "q": (hidden, hidden),
        "k": (hidden // 4, hidden),
        "v": (hidden // 4, hidden),
        "o": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "norm": (hidden,),
    }
    layer_nbytes = 3 * 4 * sum(torch.Size(shape).numel() for shape in layer.values())
    layers = max(1, total_nbytes // layer_nbytes)
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def build(mesh: DeviceMesh, shapes: dict[str, tuple[int, ...]], dim: int) -> dict[str, Any]:
    """Return a model and Adam's two moments, sharded along ``dim``."""
    generator = torch.Generator().manual_seed(0)
    return {
        part: {
            name: distribute_tensor(
                torch.randn(shape, generator=generator),
                mesh,
                [Shard(min(dim, len(shape) - 1))],
                src_data_rank=None,
            )
            for name, shape in shapes.items()
        }
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def local_tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for part in state.values():
        for tensor in part.values():
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def raw_write(path: Path, state: dict[str, Any]) -> None:
    """Write this rank's bytes to a file of its own, through the page cache, and sync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in local_tensors(state):
        view = as_bytes(tensor)
        while view:
            view = view[os.write(descriptor, view[:_REQUEST_NBYTES]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def raw_write_direct(path: Path, state: dict[str, Any], buffer: mmap.mmap) -> None:
    """Write as many bytes past the page cache, from one aligned buffer that stays filled."""
    total = sum(tensor.nbytes for tensor in local_tensors(state))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    view = memoryview(buffer)
    while total > 0:
        total -= os.write(
            descriptor, view[: -(-min(total, len(view)) // _PAGE_NBYTES) * _PAGE_NBYTES]
        )
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(path: Path, state: dict[str, Any]) -> None:
    """Read this rank's bytes back into its tensors."""
    descriptor = os.open(path, os.O_RDONLY)
    for tensor in local_tensors(state):
        view = as_bytes(tensor)
        while view:
            view = view[os.readv(descriptor, [view[:_REQUEST_NBYTES]]) :]
    os.close(descriptor)


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Meter:
    """Times what all ranks do together."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self.rank = rank
        self.nbytes = nbytes
        self.results: dict[str, list[dict[str, float]]] = {}

    def measure(self, name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        cpu = _cpu_seconds()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        action()
        dist.barrier()
        seconds = time.perf_counter() - start
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        used = torch.tensor([_cpu_seconds() - cpu])
        dist.all_reduce(used)
        self.results.setdefault(name, []).append(
            {
                "gb_per_second": self.nbytes / seconds / 1e9,
                "cpu_seconds_per_gb": used.item() / self.nbytes * 1e9,
                "rss_growth_mb": growth / 1e3,
            }
        )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_rank(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    shapes = state_shapes(int(arguments.gigabytes * 1e9))
    state = build(mesh, shapes, 0)
    rows = build(mesh, shapes, 0)
    columns = build(mesh, shapes, 1)
    nbytes = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    buffer = mmap.mmap(-1, _REQUEST_NBYTES)
    buffer.write(b"\1" * _REQUEST_NBYTES)
    meter = Meter(rank, nbytes)
    for repetition in range(arguments.repetitions):
        _repeat(rank, directory / str(repetition), meter, buffer, state, rows, columns)
    if rank == 0:
        print(json.dumps(_report(arguments, meter), indent=2))
    dist.destroy_process_group()


def _repeat(
    rank: int,
    directory: Path,
    meter: Meter,
    buffer: mmap.mmap,
    state: dict[str, Any],
    rows: dict[str, Any],
    columns: dict[str, Any],
) -> None:
    directory.mkdir(exist_ok=True)
    raw, ours, theirs = directory / f"raw{rank}", directory / "vescale", directory / "dcp"
    meter.measure("raw buffered write", lambda: raw_write(raw, state))
    meter.measure(
        "raw direct write", lambda: raw_write_direct(directory / f"direct{rank}", state, buffer)
    )
    meter.measure(
        "torch.save",
        lambda: torch.save([t.clone() for t in local_tensors(state)], directory / f"torch{rank}"),
    )
    meter.measure("vescale save", lambda: vescale_ckpt.save(ours, state))
    meter.measure("dcp save", lambda: dcp_save(state, checkpoint_id=theirs))
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(ours, state)  # allocates what later saves use again
        saver.wait()
        meter.measure("vescale async save, blocking", lambda: saver.save(ours, state))
    for temperature in ("cold", "warm"):
        for name, action in {
            "raw read": lambda: raw_read(raw, rows),
            "vescale load": lambda: vescale_ckpt.load(ours, rows),
            "vescale load to columns": lambda: vescale_ckpt.load(ours, columns),
            "dcp load": lambda: dcp_load(rows, checkpoint_id=theirs),
            "dcp load to columns": lambda: dcp_load(columns, checkpoint_id=theirs),
        }.items():
            dist.barrier()
            if temperature == "warm":
                action()
            elif rank == 0:
                forget(directory)
            meter.measure(f"{name} {temperature}", action)
    meter.measure("vescale save of columns", lambda: vescale_ckpt.save(ours, columns))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
        os.sync()
    dist.barrier()


_RATIOS = {
    "vescale save": ("raw direct write", "raw buffered write", "torch.save", "dcp save"),
    "vescale save of columns": ("raw direct write", "dcp save"),
    "vescale load cold": ("raw read cold", "dcp load cold"),
    "vescale load warm": ("raw read warm", "dcp load warm"),
    "vescale load to columns cold": ("raw read cold", "dcp load to columns cold"),
    "vescale load to columns warm": ("raw read warm", "dcp load to columns warm"),
}


def _report(arguments: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    medians = {
        name: {
            unit: round(statistics.median(result[unit] for result in results), 3)
            for unit in results[0]
        }
        for name, results in meter.results.items()
    }
    ratios = {
        f"{name} / {other}": round(
            statistics.median(
                mine["gb_per_second"] / its["gb_per_second"]
                for mine, its in zip(meter.results[name], meter.results[other], strict=True)
            ),
            2,
        )
        for name, others in _RATIOS.items()
        for other in others
    }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "ranks": arguments.ranks,
        "nbytes": meter.nbytes,
        "repetitions": arguments.repetitions,
        "ratios_of_throughput": ratios,
        "medians": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        start_processes(run_rank, args=(arguments, Path(directory)), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
