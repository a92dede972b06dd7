"""Rank processes that form one process group."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from ._rank import DeviceType, Outcome, RankSpec, serve

# Once a rank has failed the others get this long to fail too; most then wait for it in vain.
GRACE_SECONDS = 5.0
STACK_SECONDS = 0.5


class Pool:
    """``world_size`` ranks on this machine, each waiting for a job."""

    def __init__(
        self, world_size: int, warning_filters: tuple[str, ...], device_type: DeviceType
    ) -> None:
        self._directory = TemporaryDirectory(prefix="vescale-world-")
        self._specs = [
            RankSpec(
                rank=rank,
                world_size=world_size,
                device_type=device_type,
                directory=Path(self._directory.name),
                warning_filters=warning_filters,
            )
            for rank in range(world_size)
        ]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for spec in self._specs:
            self._start(spec)

    def _start(self, spec: RankSpec) -> None:
        # A fork server that has imported torch once: ranks start in milliseconds and share
        # its pages, yet hold no thread and no process group of the test process.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["vescale_testing._preload"])
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(spec, theirs), daemon=True)
        process.start()
        theirs.close()  # the rank holds the only other copy: its death is an end of file
        self._pipes.append(ours)
        self._processes.append(process)

    def submit(self, job: bytes) -> None:
        """Send a pickled ``(fn, args)`` to every rank."""
        for pipe in self._pipes:
            with suppress(OSError):  # ``collect`` reports a rank that died while idle
                pipe.send_bytes(job)

    def collect(self, *, timeout_seconds: float) -> list[Outcome]:
        """Return one outcome a rank, in rank order, after ``timeout_seconds`` at the latest."""
        outcomes: dict[int, Outcome] = {}
        missing = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout_seconds
        reason = f"no answer after {timeout_seconds:g} s"
        while missing:
            ready = wait(missing.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
                del missing[rank]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    grace = time.monotonic() + GRACE_SECONDS
                    if grace < deadline:
                        deadline = grace
                        reason = f"no answer {GRACE_SECONDS:g} s after rank {rank} failed"
        for rank, stack in self._stacks(missing).items():
            outcomes[rank] = Outcome(error=f"{reason}; it was here:\n{stack}")
        return [outcome for _, outcome in sorted(outcomes.items())]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            self._processes[rank].join(timeout=5)
            died = f"died with exit code {self._processes[rank].exitcode}"
            stacks = self._specs[rank].stack_path.read_text("utf-8")
            return Outcome(error=f"{died}\n{stacks}".rstrip())
        return pickle.loads(answer)

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return where in Python each of ``ranks``, which are still running, is."""
        running = tuple(ranks)
        for rank in running:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        if running:
            time.sleep(STACK_SECONDS)
        return {rank: self._specs[rank].stack_path.read_text("utf-8") for rank in running}

    def stop(self) -> None:
        """End the ranks, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join()
        self._directory.cleanup()
