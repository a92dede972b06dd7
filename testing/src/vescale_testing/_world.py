"""The face of a rank pool that tests see."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from ._error import RankError
from ._pool import Pool
from ._rank import DeviceType, Outcome

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_SECONDS = 120.0
# A process group keeps its sockets and threads until the ranks end, and a process may often
# open no more than 1,024 files.
MAX_OPEN_FILES = 400


class World:
    """``world_size`` ranks on this machine; ``run`` calls a function once on each.

    The ranks start at the first ``run`` and stay up for the next. A test cannot poison a later
    one: after any failure the ranks are replaced, and before each job a rank's environment
    (torchrun's ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``), random seeds (0),
    default dtype (float32), gradient mode (on) and number of threads (1) are set anew.

    Args:
        world_size: Number of ranks.
        warning_filters: What becomes of a warning on a rank, in the syntax of pytest's
            ``filterwarnings``.
        device_type: With ``"cuda"`` every rank has a GPU and they talk over NCCL. If there are
            too few GPUs ranks share them and talk over gloo: NCCL knows one rank a GPU. With
            ``"cpu"`` they see no GPU, and talk over gloo.
    """

    def __init__(
        self,
        world_size: int,
        *,
        warning_filters: Sequence[str] = (),
        device_type: DeviceType = "cpu",
    ) -> None:
        self.world_size = world_size
        self._device_type: DeviceType = device_type
        self._warning_filters = tuple(warning_filters)
        self._pool: Pool | None = None

    def run(self, fn: Callable[[*Ts], T], *args: *Ts, timeout: float = 120.0) -> list[T]:
        """Call ``fn(*args)`` on every rank and return the results in rank order.

        Args:
            fn: A function that can be imported by name: no lambda, no nested function.
            args: What to call it with; each rank gets its own copy.
            timeout: Seconds after which ranks that have not answered are stopped. A collective
                gives up by itself after 60.

        Raises:
            RankError: If a rank raised, died or gave no answer.
        """
        __tracebackhide__ = True  # pytest: show the call in the test and the ranks' tracebacks
        job = pickle.dumps((fn, args))
        try:
            pool = self._pool or self._start()
            pool.submit(job)
            outcomes = pool.collect(timeout_seconds=timeout)
            _raise_errors(outcomes)
        except BaseException:  # Ctrl-C too: a late answer must not meet the next question
            self.close()
            raise
        if any(outcome.num_open_files > MAX_OPEN_FILES for outcome in outcomes):
            self.close()
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End the ranks; another ``run`` would start new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def _start(self) -> Pool:
        self._pool = Pool(self.world_size, self._warning_filters, self._device_type)
        _raise_errors(self._pool.collect(timeout_seconds=START_SECONDS))
        return self._pool


def _raise_errors(outcomes: Sequence[Outcome]) -> None:
    __tracebackhide__ = True
    errors = {rank: o.error for rank, o in enumerate(outcomes) if o.error is not None}
    if errors:
        raise RankError(
            errors,
            {rank: o.exception for rank, o in enumerate(outcomes) if o.exception is not None},
        )
