"""Asynchronous saves: copy the state to host memory, then write the copy from a thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from vescale_ckpt._comm.control_group import DEFAULT_TIMEOUT, ControlGroup, separate_control_group
from vescale_ckpt._state.arguments import check_arguments
from vescale_ckpt.exceptions import CheckpointError

from .destination import Destination, FileLayout, destination_of
from .host_staging import HostStaging
from .save import Snapshot, snapshot, write_checkpoint

# How long a thread may take to begin whose start was interrupted.
_START_SECONDS = 10.0


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """Saves checkpoints in the background, one at a time.

    :meth:`save` returns when the state has been copied to host memory that stays allocated from
    one save to the next (pinned if the state is on a GPU). Ranks then write and commit on a
    process group of their own, so that the collectives of training do not meet theirs. An error
    is raised, on every rank, by the next :meth:`save`, by :meth:`wait`, or at the end of the
    ``with`` block.

    Every rank must construct this, and call its methods in the same order. ``timeout`` is how
    long ranks wait for one another before they give up on one that hangs. A process that ends
    finishes its save first, and prints a failure that nobody has asked for.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as directory, AsyncSaver() as saver:
        ...     saver.save(f"{directory}/step-1", {"model": model})
        ...     saver.wait()
    """

    def __init__(self, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = timeout
        self._ranks: ControlGroup = separate_control_group(timeout)
        self._staging = HostStaging()
        self._running: _Running | None = None
        self._outcome = _Outcome()
        # Runs at the end of the process at the latest: a failed save never goes unnoticed.
        weakref.finalize(self, _complain, self._outcome)

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written by this rank."""
        return self._running is not None and self._running.is_alive

    @property
    def written_nbytes(self) -> int:
        """How many bytes this rank has written so far for the last save."""
        return self._outcome.written_nbytes

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        keep_last: int | None = None,
        layout: FileLayout | None = None,
    ) -> None:
        """Copy ``state`` aside and start to save it as :func:`vescale_ckpt.save` does.

        Waits for the save before, should that not be finished.

        Args:
            path: As for :func:`vescale_ckpt.save`.
            state: As for :func:`vescale_ckpt.save`.
            keep_last: As for :func:`vescale_ckpt.save`.
            layout: As for :func:`vescale_ckpt.save`.

        Raises:
            ValueError: As for :func:`vescale_ckpt.save`.
            CheckpointError: If the save *before* failed, on any rank. What is wrong with this one
                is found in the background: all ranks have to hear of it.
        """

        def chosen() -> Destination:
            check_arguments("save", path, state)
            return destination_of(path, layout=layout, keep_last=keep_last)

        before = self._running
        try:
            error = self._start(chosen, state)
        except BaseException:
            if self._running is None:
                with self._ranks.together():  # tells the others, or lets go of them
                    raise
            # A thread that has begun with this save goes to the others.
            if before is not None and self._running is before:
                before.then(self._ranks.close)
            raise
        if error is not None:
            raise error

    def _start(
        self, chosen: Callable[[], Destination], state: Mapping[str, Any]
    ) -> BaseException | None:
        """Begin a save, or return the error of the save before, which every rank has."""
        destination: Destination | None = None
        failure: Exception | None = None
        try:
            destination = chosen()
        except Exception as error:
            if self._ranks.size == 1:
                raise
            failure = error
        error = self._ended()
        if error is not None:
            return error
        if self._ranks.is_closed:
            self._ranks = separate_control_group(self._timeout)
        self._outcome.written_nbytes = 0
        self._begin(state, destination, failure)
        return None

    def _begin(
        self, state: Mapping[str, Any], destination: Destination | None, failure: Exception | None
    ) -> None:
        """Copy ``state`` aside and start to save it, or to tell all ranks of a failure."""
        taken: Snapshot | None = None
        outcome, ranks = self._outcome, self._ranks

        def choose() -> Destination:
            if failure is not None or destination is None:
                raise failure or AssertionError
            return destination

        def take() -> Snapshot:
            assert taken is not None
            return taken

        def work() -> None:
            try:
                write_checkpoint(choose, take, ranks, progress=outcome.add_written)
            except BaseException as error:
                outcome.error = error

        try:
            try:
                taken = self._staging.copy(snapshot(state, ranks))
            except Exception as error:
                failure = failure or error
            if ranks.communicates_on_one_thread:
                work()
            else:
                self._running = _Running(work)
                self._running.start()
        except BaseException as error:
            if self._running is not None and not self._running.call_off():
                raise  # what was interrupted is the start of a thread that writes
            self._running = None
            # The other ranks must not wait for this one in vain.
            if not isinstance(error, Exception):
                ranks.close()
                raise
            failure = failure or error
            work()

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: If it failed, on any rank.
        """
        error = self._ended()
        if error is not None:
            raise error

    def _ended(self) -> BaseException | None:
        """Return what is wrong with the last save when it has ended."""
        if self._running is not None:
            is_done = self._running.wait()
            self._running = None
            if not is_done:
                self._ranks.close()
                return CheckpointError(
                    "the save in the background never began, nothing was saved: the start of its "
                    "thread was interrupted"
                )
        error, self._outcome.error = self._outcome.error, None
        if not isinstance(error, CheckpointError):
            return error
        told = type(error)(f"the save in the background failed: {error}")
        told.__cause__ = error
        return told

    def __exit__(self, *problem: object) -> None:
        self.wait()


class _Running:
    """A save's thread; whoever starts it or waits for it may be interrupted, it is not.

    An interrupt of ``Thread.start`` or ``Thread.join`` leaves open whether the thread runs, see
    [Note: interrupts] in thread_pool.py, and it must not run while the copy that it writes is
    overwritten.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._is_called_off = False
        self._after: Callable[[], None] | None = None
        self._is_done = False

    def start(self) -> None:
        """Call the work in a thread, or here if there are no more threads.

        The other ranks must not wait for this one in vain.
        """
        try:
            threading.Thread(target=self._run, name="vescale-ckpt-save").start()
        except RuntimeError:
            self._run()

    @property
    def is_alive(self) -> bool:
        """Whether the work is being done."""
        return self._begun.is_set() and not self._ended.is_set()

    def wait(self) -> bool:
        """Return True when the work is done, or False if it will never begin."""
        if not self._begun.wait(_START_SECONDS) and self.call_off():
            return False
        self._ended.wait()
        return True

    def call_off(self) -> bool:
        """Keep the work from beginning, and return whether it had not begun."""
        with self._lock:
            self._is_called_off = not self._begun.is_set()
            return self._is_called_off

    def then(self, after: Callable[[], None]) -> None:
        """Call something when the work has been done, before anybody stops waiting for it."""
        with self._lock:
            if not self._is_done:
                self._after = after
                return
        after()

    def _run(self) -> None:
        with self._lock:
            # A handler of signals may raise what start takes for the lack of a thread.
            if self._is_called_off or self._begun.is_set():
                return
            self._begun.set()
        try:
            self._work()
        finally:
            with self._lock:
                self._is_done, after = True, self._after
            try:
                if after is not None:
                    after()
            finally:
                self._ended.set()


class _Outcome:
    """What has become of a save; known to its thread and its saver."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.written_nbytes = 0

    def add_written(self, nbytes: int) -> None:
        """Count bytes that have been written."""
        self.written_nbytes += nbytes


def _complain(outcome: _Outcome) -> None:
    if outcome.error is not None:
        raise CheckpointError(
            f"the last save in the background failed, and nothing waited for it: {outcome.error}"
        ) from outcome.error
