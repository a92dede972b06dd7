"""How fast checkpoints are saved and loaded, beside the raw disk and torch's own ways.

Run ``python benchmarks/ckpt.py --ranks 2 --gigabytes 1 --directory /a/directory/on/the/disk``.
It prints one JSON object. Everything is measured in one run, in another order each time, because
a disk is never the same twice: read the ratios, not the gigabytes per second. The raw disk is
measured right before or after what is compared with it. What a checkpoint
holds does not depend on how many ranks wrote it, so with ``--ranks 4`` the loads of columns and
copies read just what they would after a save by two ranks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
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


def build(
    mesh: DeviceMesh, shapes: dict[str, tuple[int, ...]], *placements: Placement
) -> dict[str, Any]:
    """Return a model and Adam's two moments."""
    generator = torch.Generator().manual_seed(0)
    return {
        part: {
            name: distribute_tensor(
                torch.randn(shape, generator=generator),
                mesh,
                [p if p.is_replicate() or len(shape) > 1 else Shard(0) for p in placements],
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


def raw_read_direct(path: Path, buffer: mmap.mmap) -> None:
    """Read a file past the page cache into one aligned buffer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    while os.readv(descriptor, [buffer]):
        pass
    os.close(descriptor)


def copy_memory(state: dict[str, Any], copy: torch.Tensor) -> None:
    """Copy this rank's bytes to memory that has been used before."""
    start = 0
    for tensor in local_tensors(state):
        copy[start : start + tensor.numel()].copy_(tensor.view(-1))
        start += tensor.numel()


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in _files(directory):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remember(path: Path) -> None:
    """Read a file, or those of a directory, into the page cache."""
    for file in _files(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(_REQUEST_NBYTES):
                pass


def _files(path: Path) -> list[Path]:
    return [file for file in [path, *path.rglob("*")] if file.is_file()]


class Meter:
    """Times what all ranks do together."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.results: dict[str, list[dict[str, float]]] = {}

    def measure(self, name: str, action: Callable[[], Any]) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of memory
        resident = _status("VmRSS")
        dist.barrier()
        before = torch.tensor([_cpu_seconds(), *_bytes_read()], dtype=torch.float64)
        start = time.perf_counter()
        action()
        dist.barrier()
        seconds = time.perf_counter() - start
        peak = torch.tensor([float(_status("VmHWM") - resident)])
        used = torch.tensor([_cpu_seconds(), *_bytes_read()], dtype=torch.float64) - before
        dist.all_reduce(used)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.results.setdefault(name, []).append(
            {
                "gb_per_second": self.nbytes / seconds / 1e9,
                "cpu_seconds_per_gb": used[0].item() / self.nbytes * 1e9,
                "bytes_read_per_byte": used[1].item() / self.nbytes,
                "disk_bytes_read_per_byte": used[2].item() / self.nbytes,
                "extra_mb_per_rank": peak.item() / 1e3,
            }
        )


def _status(field: str) -> int:
    """Return a line of the kernel's about this process, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise ValueError(field)


def _bytes_read() -> tuple[int, int]:
    """Return how many bytes this process has asked files for, and how many came from a disk."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1]), int(words[words.index("read_bytes:") + 1])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_rank(rank: int, arguments: argparse.Namespace, directory: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    shapes = state_shapes(int(arguments.gigabytes * 1e9))
    states = {
        "rows": build(mesh, shapes, Shard(0)),
        "columns": build(mesh, shapes, Shard(1)),
        "copies": build(mesh, shapes, Replicate()),
    }
    if arguments.ranks == 4:
        square = init_device_mesh("cpu", (2, 2))
        states["tp x fsdp"] = build(square, shapes, Shard(1), Shard(0))
    nbytes = sum(tensor.nbytes for part in states["rows"].values() for tensor in part.values())
    buffer = mmap.mmap(-1, _REQUEST_NBYTES)
    buffer.write(b"\1" * _REQUEST_NBYTES)
    copy = torch.ones(sum(tensor.numel() for tensor in local_tensors(states["rows"])))
    meter = Meter(nbytes)
    with vescale_ckpt.AsyncSaver() as saver:
        bench = Bench(rank, meter, states, buffer, copy, saver)
        for repetition in range(arguments.repetitions):
            bench.repeat(directory / str(repetition), repetition)
    if rank == 0:
        print(json.dumps(_report(arguments, meter), indent=2))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Bench:
    """What one rank measures."""

    rank: int
    meter: Meter
    states: dict[str, dict[str, Any]]
    buffer: mmap.mmap
    copy: torch.Tensor
    saver: vescale_ckpt.AsyncSaver

    def repeat(self, directory: Path, repetition: int) -> None:
        directory.mkdir(exist_ok=True)
        rng = random.Random(repetition)
        writes = self._writes(directory)
        for name in _shuffled(writes, rng):
            self._settle()
            self.meter.measure(name, writes[name])
        reads = self._reads(directory)
        for name in _shuffled(reads, rng):
            path, read = reads[name]
            self._settle()
            self._forget(directory)
            self.meter.measure(f"{name} cold", read)
            if "direct" not in name:
                self._forget(directory)
                remember(path)
                self.meter.measure(f"{name} warm", read)
        rows = self.states["rows"]
        self.meter.measure("memory copy", lambda: copy_memory(rows, self.copy))
        self.saver.save(directory / "async", rows)  # allocates what later saves use again
        self.saver.wait()
        self.meter.measure(
            "vescale async save, blocking", lambda: self.saver.save(directory / "async", rows)
        )
        self.saver.wait()
        self._settle()
        if self.rank == 0:
            shutil.rmtree(directory)
        self._settle()

    def _writes(self, directory: Path) -> dict[str, Callable[[], Any]]:
        rows, columns = self.states["rows"], self.states["columns"]
        own = {str(i): tensor for i, tensor in enumerate(local_tensors(rows))}
        file = directory / str(self.rank)
        threads = FileSystemWriter(directory / "dcp threads", thread_count=2)
        hugging_face = HuggingFaceStorageWriter(str(directory / "dcp hf"), save_distributed=True)
        return {
            "raw buffered write": lambda: raw_write(file.with_suffix(".raw"), rows),
            "raw direct write": lambda: raw_write_direct(
                file.with_suffix(".direct"), rows, self.buffer
            ),
            "torch.save": lambda: torch.save(own, file.with_suffix(".pt")),
            "safetensors save": lambda: save_file(own, file.with_suffix(".safetensors")),
            "dcp save": lambda: dcp_save(rows, checkpoint_id=directory / "dcp"),
            "dcp threads save": lambda: dcp_save(rows, storage_writer=threads),
            "dcp hf save": lambda: dcp_save(_flat(rows), storage_writer=hugging_face),
            "vescale save": lambda: vescale_ckpt.save(directory / "vescale", rows),
            "vescale save of columns": lambda: vescale_ckpt.save(directory / "columns", columns),
        }

    def _reads(self, directory: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
        """Return by name where the bytes lie that this rank may need, and what reads them."""
        file = directory / str(self.rank)
        raw, direct = file.with_suffix(".raw"), file.with_suffix(".direct")
        single = file.with_suffix(".safetensors")
        ours, theirs = directory / "vescale", directory / "dcp"
        reads: dict[str, tuple[Path, Callable[[], Any]]] = {
            "raw read": (raw, lambda: raw_read(raw, self.states["rows"])),
            "raw direct read": (direct, lambda: raw_read_direct(direct, self.buffer)),
            "safetensors load": (single, lambda: load_file(single)),
        }
        for name, state in self.states.items():
            reads[f"vescale load {name}"] = (
                ours,
                lambda state=state: vescale_ckpt.load(ours, state),
            )
            reads[f"vescale exchanging load {name}"] = (
                ours,
                lambda state=state: vescale_ckpt.load(ours, state, exchange=True),
            )
            reads[f"dcp load {name}"] = (
                theirs,
                lambda state=state: dcp_load(state, checkpoint_id=theirs),
            )
        return reads

    def _settle(self) -> None:
        dist.barrier()
        if self.rank == 0:
            os.sync()
        dist.barrier()

    def _forget(self, directory: Path) -> None:
        if self.rank == 0:
            forget(directory)
        dist.barrier()


def _shuffled(names: Iterable[str], rng: random.Random) -> list[str]:
    """Return names in any order, but neighbours side by side."""
    order = list(names)
    rng.shuffle(order)
    for name, neighbour in _NEIGHBOURS.items():
        if name in order:
            order.remove(neighbour)
            order.insert(order.index(name) + rng.randrange(2), neighbour)
    return order


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{name}": tensor for part, group in state.items() for name, tensor in group.items()
    }


_NEIGHBOURS = {"vescale save": "raw direct write", "vescale load rows": "raw direct read"}
_RATIOS = {
    "vescale save": (
        "raw direct write",
        "raw buffered write",
        "torch.save",
        "safetensors save",
        "dcp save",
        "dcp threads save",
        "dcp hf save",
    ),
    "vescale save of columns": ("raw direct write", "dcp save"),
    "vescale async save, blocking": ("memory copy",),
    "vescale load rows cold": ("raw direct read cold", "raw read cold", "dcp load rows cold"),
    "vescale load rows warm": ("memory copy", "raw read warm", "dcp load rows warm"),
    "vescale load columns cold": ("raw direct read cold", "dcp load columns cold"),
    "vescale load columns warm": ("memory copy", "dcp load columns warm"),
    "vescale load copies cold": ("raw direct read cold", "dcp load copies cold"),
    "vescale load copies warm": ("memory copy", "dcp load copies warm"),
    "vescale load tp x fsdp cold": ("raw direct read cold", "dcp load tp x fsdp cold"),
    "vescale load tp x fsdp warm": ("memory copy", "dcp load tp x fsdp warm"),
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
        if name in meter.results
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
