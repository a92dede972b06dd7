"""What ranks that torchrun started find out together."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from .command import CommandError
from .finding import Finding
from .machine_checks import versions

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)
_GIB = 2**30
# Large enough for the speed of links to show.
_NUMEL = 4 * 2**20
_REPEATS = 5


@dataclass(frozen=True)
class Ranks:
    """The processes of a job, which must all call the same methods.

    Attributes:
        rank: Of this process.
        size: How many there are.
        token: The same on every rank, another in every run.
    """

    rank: int
    size: int
    token: str

    def gathered(self, value: T) -> list[T]:
        """Return what every rank gave."""
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone  # pyright: ignore[reportReturnType]: all are filled

    def compare(self) -> list[Finding]:
        """Return whether all ranks run the same versions, and how long a collective takes."""
        return [self.same_versions(), self._collective()]

    def same_versions(self) -> Finding:
        """Return whether all ranks have the same versions."""
        everyone = self.gathered(versions())
        for rank, theirs in enumerate(everyone[1:], 1):
            for name, version in everyone[0].items():
                if theirs[name] != version:
                    text = f"{name} is {version} on rank 0 and {theirs[name]} on rank {rank}"
                    return Finding("ranks", "error", text, "install the same on every machine")
        return Finding("ranks", "ok", f"{self.size}, all with the same versions")

    def _collective(self) -> Finding:
        has_gpu = torch.cuda.is_available()
        tensor = torch.ones(_NUMEL, device="cuda" if has_gpu else "cpu")
        dist.all_reduce(tensor)  # the first one connects the ranks
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            dist.all_reduce(tensor)
        if has_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / _REPEATS
        # What a ring sends.
        sent = 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()
        text = (
            f"all-reduce of {tensor.numel() * tensor.element_size() / 2**20:.0f} MiB takes "
            f"{seconds * 1e3:.3g} ms, {sent / seconds / 1e9:.2g} GB/s a rank"
        )
        if has_gpu and self.size > 1 and sent / seconds < 1e9:
            remedy = "NCCL_DEBUG=INFO shows which network it took; NCCL_SOCKET_IFNAME chooses one"
            return Finding("collective", "warn", text, remedy)
        return Finding("collective", "ok", text)


@contextmanager
def joined_ranks() -> Iterator[Ranks | None]:
    """Join the ranks that torchrun started; None without torchrun.

    Raises:
        CommandError: If they do not find each other.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
        token: list[str | None] = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(token, src=0)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CommandError(
            f"the {os.environ['WORLD_SIZE']} ranks did not find each other at {where} within "
            f"{_TIMEOUT.seconds} s ({error}); is that address reachable from every machine, and "
            "the port open?"
        ) from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), str(token[0]))
    finally:
        dist.destroy_process_group()


def check_shared(directory: Path, ranks: Ranks | None, *, within_seconds: float = 5.0) -> Finding:
    """Return whether what is written to a directory is seen by every rank, and lasts a rename.

    Every rank must call this, if there are any.

    Args:
        directory: Where checkpoints would go.
        ranks: Those of the job; None without torchrun.
        within_seconds: How late a network file system may show a file of another machine.
    """
    name = f"directory {directory}"
    trouble = _written(directory, "0" if ranks is None else f"{ranks.token}-{ranks.rank}")
    everyone = [trouble] if ranks is None else ranks.gathered(trouble)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text]
    if failed:
        remedy = "give a directory that exists and that every rank may write to"
        return Finding(name, "error", "; ".join(failed[:3]), remedy)
    if ranks is not None:
        wanted = [directory / f".vescale-doctor-{ranks.token}-{r}" for r in range(ranks.size)]
        missing = _missing(wanted, within_seconds)
        blind = [rank for rank, lacks in enumerate(ranks.gathered(missing)) if lacks]
        wanted[ranks.rank].unlink(missing_ok=True)
        if blind:
            text = f"ranks {blind} do not see files of all others: it is not one file system"
            remedy = "checkpoints need a directory that all machines share (NFS, Lustre), or s3://"
            return Finding(name, "error", text, remedy)
    free = shutil.disk_usage(directory).free
    seen = "" if ranks is None else f"seen by all {ranks.size} ranks, "
    return Finding(name, "ok", f"{seen}{free / _GIB:.0f} GiB free")


def _missing(files: list[Path], within_seconds: float) -> list[int]:
    """Return which files there are not, even after a while."""
    deadline = time.monotonic() + within_seconds
    while True:
        os.listdir(files[0].parent)  # has a network file system look again
        missing = [index for index, file in enumerate(files) if not file.is_file()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)


def _written(directory: Path, suffix: str) -> str:
    """Write a file and rename it, as checkpoints are; return what went wrong."""
    target = directory / f".vescale-doctor-{suffix}"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(uuid.uuid4().bytes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, target)
        if suffix == "0":
            target.unlink()
    except OSError as error:
        return str(error)
    return ""
