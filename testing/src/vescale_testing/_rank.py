"""What a rank process does: join the world, then run the jobs it is sent, one after the other."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ._pytest_private import apply_warning_filters
from ._torch_private import serve_all_groups_by_one_thread

COLLECTIVE_TIMEOUT = timedelta(seconds=60)

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """Everything a rank process needs to know before its first job."""

    rank: int
    world_size: int
    device_type: DeviceType
    directory: Path  # holds the rendezvous file and the ranks' stack dumps
    warning_filters: tuple[str, ...]  # in the syntax of pytest's ``filterwarnings``

    @property
    def stack_path(self) -> Path:
        """Where this rank writes its Python stacks when it gets ``SIGUSR1``, or crashes."""
        return self.directory / f"stack-{self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one job on one rank; ``value`` counts only if ``error`` is None."""

    value: Any = None
    error: str | None = None
    exception: BaseException | None = None
    num_open_files: int = 0


def serve(spec: RankSpec, pipe: Connection) -> None:
    """Run jobs from ``pipe`` until it closes, as it does when the test process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's to handle
    with spec.stack_path.open("w", encoding="utf-8") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file)
        faulthandler.enable(stack_file)
        environment = {**os.environ, **_rank_environment(spec)}
        os.environ.update(environment)
        pipe.send_bytes(_attempt(partial(_join, spec)))
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                return
            _reset(environment)
            pipe.send_bytes(_attempt(partial(_call, job)))


def _join(spec: RankSpec) -> None:
    apply_warning_filters(spec.warning_filters, ())
    serve_all_groups_by_one_thread()
    on_gpus_of_their_own = (
        spec.device_type == "cuda" and torch.cuda.device_count() >= spec.world_size
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus_of_their_own else "gloo",
        init_method=f"file://{spec.directory / 'store'}",
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _call(job: bytes) -> Any:
    fn, args = pickle.loads(job)
    return fn(*args)


def _attempt(action: Callable[[], Any]) -> bytes:
    """Return the pickled outcome of ``action``, whatever it does."""
    try:
        value = action()
        return pickle.dumps(Outcome(value=value, num_open_files=len(os.listdir("/dev/fd"))))
    except BaseException as exception:
        error = traceback.format_exc()
        return pickle.dumps(Outcome(error=error, exception=_if_picklable(exception)))


def _if_picklable(exception: BaseException) -> BaseException | None:
    """Return ``exception`` if it survives the way to the test process, else None."""
    try:
        pickle.loads(pickle.dumps(exception))
    except Exception:
        return None
    return exception


def _reset(environment: Mapping[str, str]) -> None:
    """Undo what an earlier job may have left behind."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    random.seed(0)  # every process has its own, but for this
    torch.manual_seed(0)


def _local_rank(spec: RankSpec) -> int:
    """Return the index of the rank's GPU; ranks share them if there are too few."""
    if spec.device_type == "cpu":
        return spec.rank
    return spec.rank % torch.cuda.device_count()


def _rank_environment(spec: RankSpec) -> dict[str, str]:
    """Return what torchrun sets, and the interface that needs no working network."""
    environment = {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(_local_rank(spec)),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "OMP_NUM_THREADS": "1",
    }
    if spec.device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    loopback = {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex())
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return environment
