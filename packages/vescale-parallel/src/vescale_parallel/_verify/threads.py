"""Ranks that are threads of this process, and threads without their caller's modes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import nn

from vescale_parallel._model.kept_outside import nothing_kept_outside
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._trace.generators import set_generators, states_of_generators

T = TypeVar("T")


class _Turns:
    """Turns of threads, of which one runs at a time.

    Models, libraries and torch keep things that two threads must not use at once: under a
    ``TorchFunctionMode`` ``torch.promote_types`` of torch 2.13 ends the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        self._take(rank)
        try:
            yield
        finally:
            self._give(rank)

    @contextlib.contextmanager
    def passed_on(self, rank: int) -> Iterator[None]:
        self._give(rank)
        try:
            yield
        finally:
            self._take(rank)

    def _take(self, rank: int) -> None:
        self._lock.acquire()

    def _give(self, rank: int) -> None:
        self._lock.release()


class _TurnsWithGenerators(_Turns):
    """Turns of threads, each with the host's generators as if it alone drew from them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._states = [states_of_generators() for _ in range(size)]

    def _take(self, rank: int) -> None:
        super()._take(rank)
        set_generators(self._states[rank])

    def _give(self, rank: int) -> None:
        self._states[rank] = states_of_generators()
        super()._give(rank)


def run_in_threads(
    size: int, on_rank: Callable[[int, ThreadExchange], Any], *, draw_alike: bool = False
) -> list[Any]:
    """Call a function on every rank, each in a thread of its own; one runs at a time.

    It gets the rank, and where ranks exchange tensors. With ``draw_alike`` all draw the same
    numbers from the host's generators, as processes do. What the first rank that failed raised is
    raised.
    """
    turns = _TurnsWithGenerators(size) if draw_alike else _Turns()
    exchange = ThreadExchange(size, turns)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def work(rank: int) -> None:
        try:
            with turns.turn(rank):
                results[rank] = on_rank(rank, exchange)
        # Handed to the caller below.
        except Exception as error:
            errors.append(error)
            exchange.give_up()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


def in_fresh_thread(run: Callable[[], T], of: nn.Module) -> T:
    """Try a model without the modes of this thread: autocast, inference, counters, devices.

    What its code keeps outside of it is as before afterwards.
    """
    with nothing_kept_outside(of), ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
