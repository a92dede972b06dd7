"""What one machine has, and what of it would spoil a run."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib import import_module
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from .finding import Finding

PACKAGES = (
    "vescale", "vescale_planner", "vescale_parallel", "vescale_ckpt", "vescale_deferred",
    "vescale_dtensor",
)  # fmt: skip
_GIB = 2**30
# What a save of many files, a data loader's workers and NCCL's sockets may hold open together.
_OPEN_FILES = 4096


def check_machine() -> list[Finding]:
    """Return everything that can be said without other ranks."""
    return [
        _torch(),
        _packages(),
        *_backends(),
        *_devices(),
        *_links(),
        _memory(),
        _cores(),
        _shared_memory(),
        _open_files(),
    ]


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    text = f"{torch.__version__} ({build}), Python {platform.python_version()}"
    if torch.version.cuda and not torch.cuda.is_available():
        remedy = "check nvidia-smi: no GPU, no driver, or one older than this build of torch needs"
        return Finding("torch", "warn", f"{text}, but no GPU can be used", remedy)
    return Finding("torch", "ok", text)


def versions() -> dict[str, str]:
    """Return the versions of torch and of all packages of this project."""
    found = {name: str(import_module(name).__version__) for name in PACKAGES}
    return {"torch": torch.__version__, **found}


def _packages() -> Finding:
    found = {name: version for name, version in versions().items() if name != "torch"}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if len({version.rpartition(".")[0] for version in found.values()}) > 1:
        remedy = "pip install --upgrade " + " ".join(n.replace("_", "-") for n in found)
        return Finding("packages", "warn", text, remedy)
    if len(set(found.values())) == 1:
        text = f"vescale and all it is made of: {found['vescale']}"
    return Finding("packages", "ok", text)


def _backends() -> Iterator[Finding]:
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    text = ", ".join(name for name, is_there in has.items() if is_there) or "none"
    if has["nccl"] and torch.cuda.is_available():
        text += f" {'.'.join(map(str, nccl.version()))}"
    if not has["gloo"]:
        yield Finding("backends", "error", text, "install a build of torch with gloo")
    elif torch.cuda.is_available() and not has["nccl"]:
        yield Finding("backends", "error", text, "install a build of torch with nccl for its GPUs")
    else:
        yield Finding("backends", "ok", text)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("devices", "ok", "no GPU: ranks compute on the CPU, over gloo")
        return
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = {f"{each.name} ({each.total_memory / _GIB:.0f} GiB)" for each in found}
    text = f"{len(found)} x {', '.join(sorted(names))}"
    if len(names) > 1:
        remedy = (
            "all ranks do the same work, at the speed of the slowest: use CUDA_VISIBLE_DEVICES"
        )
        yield Finding("devices", "warn", text, remedy)
    else:
        yield Finding("devices", "ok", text)


def _links() -> Iterator[Finding]:
    adapters = Path("/sys/class/infiniband")
    cards = sorted(each.name for each in adapters.iterdir()) if adapters.is_dir() else []
    network = f"RDMA network: {', '.join(cards)}" if cards else "no RDMA network"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        yield Finding("links", "ok", network)
        return
    apart = [
        pair for pair in permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(*pair)
    ]  # fmt: skip
    if apart:
        text = (
            f"GPUs {apart[0][0]} and {apart[0][1]} have no direct access to each other; {network}"
        )
        remedy = "expect slow tensor parallelism between them; nvidia-smi topo -m shows the links"
        yield Finding("links", "warn", text, remedy)
    else:
        yield Finding("links", "ok", f"every GPU has direct access to every other; {network}")


def _memory() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / _GIB:.0f} GiB"
    if "SC_AVPHYS_PAGES" in os.sysconf_names:  # not on macOS
        text += f", {page * os.sysconf('SC_AVPHYS_PAGES') / _GIB:.0f} GiB of it unused"
    limit = _container_limit()
    if limit is not None and limit < total:
        text += f", limited to {limit / _GIB:.0f} GiB for this container"
    return Finding("memory", "ok", text)


def _container_limit() -> int | None:
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


def _cores() -> Finding:
    # Not all systems say which of the cores this process may use.
    ask = getattr(os, "sched_getaffinity", None)
    cores = len(ask(0)) if ask is not None else os.cpu_count() or 1
    ranks, threads = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads()
    text = f"{cores} for {ranks} rank{'s' if ranks > 1 else ''} here, {threads} threads each"
    if ranks * threads > cores and ranks > 1:
        fair = max(1, cores // ranks)
        return Finding("cores", "warn", text, f"export OMP_NUM_THREADS={fair} before torchrun")
    return Finding("cores", "ok", text)


def _shared_memory() -> Finding:
    where = Path("/dev/shm")
    if not where.is_dir():
        return Finding("/dev/shm", "ok", "not used on this system")
    free = shutil.disk_usage(where).free
    text = f"{free / _GIB:.1f} GiB free"
    if free < _GIB:
        remedy = "workers of a DataLoader need more: docker run --shm-size=16g, or --ipc=host"
        return Finding("/dev/shm", "warn", text, remedy)
    return Finding("/dev/shm", "ok", text)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} may be open at the same time"
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        target = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 2**16)
        return Finding("open files", "warn", text, f"ulimit -n {target}")
    return Finding("open files", "ok", text)
