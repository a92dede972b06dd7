"""Asynchronous saves: copy the state to host memory, then write the copy from a thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch

from vescale_ckpt._comm.control_group import DEFAULT_TIMEOUT, ControlGroup, separate_control_group
from vescale_ckpt._state.arguments import check_arguments
from vescale_ckpt._state.local_shards import LocalShard
from vescale_ckpt.exceptions import CheckpointError

from .destination import Destination, FileLayout, destination_of
from .save import Snapshot, snapshot, write_checkpoint

_ALIGNMENT = 64
_MIN_PIECE_NBYTES = 1 << 20
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
        destination: Destination | None = None
        taken: Snapshot | None = None
        failure: Exception | None = None
        try:
            check_arguments("save", path, state)
            destination = destination_of(path, layout=layout, keep_last=keep_last)
        except Exception as error:
            if self._ranks.size == 1:
                raise
            failure = error
        self.wait()
        if self._ranks.is_closed:
            self._ranks = separate_control_group(self._timeout)
        outcome, ranks = self._outcome, self._ranks
        outcome.written_nbytes = 0

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
        if self._running is not None:
            is_done = self._running.wait()
            self._running = None
            if not is_done:
                self._ranks.close()
                raise CheckpointError(
                    "the save in the background never began, nothing was saved: the start of its "
                    "thread was interrupted"
                )
        error, self._outcome.error = self._outcome.error, None
        if isinstance(error, CheckpointError):
            raise type(error)(f"the save in the background failed: {error}") from error
        if error is not None:
            raise error

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

    def _run(self) -> None:
        with self._lock:
            # A handler of signals may raise what start takes for the lack of a thread.
            if self._is_called_off or self._begun.is_set():
                return
            self._begun.set()
        try:
            self._work()
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


class HostStaging:
    """Host memory that holds a copy of this rank's shards.

    [Note: pieces]
    torch rounds each piece of pinned memory up to a power of two: 4.1 GB would take 8. So there
    are several, whose lengths are powers of two by themselves, long ones first.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        # Where the tensors of the last save lie in them, by their identities.
        self._places: dict[Any, torch.Tensor] = {}

    def copy(self, taken: Snapshot) -> Snapshot:
        """Return a snapshot whose tensors lie in this memory; overwrites the one before."""
        identities = {
            key: shard.identity for key, shard in taken.shards.items() if _is_needed(shard)
        }
        sources: dict[Any, torch.Tensor] = {}
        for key, identity in identities.items():
            if identity is not None:
                sources.setdefault(identity, taken.shards[key].local)
        on_gpu = any(source.is_cuda for source in sources.values())
        if sources.keys() != self._places.keys():
            self._places = self._laid_out(sources, pin_memory=on_gpu)
        for identity, source in sources.items():
            self._places[identity].copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        shards = {
            key: _placed(shard, self._places.get(identities[key]))
            if key in identities
            else _emptied(shard)
            for key, shard in taken.shards.items()
        }
        return Snapshot(taken.encoded, shards)

    def _laid_out(
        self, sources: Mapping[Any, torch.Tensor], *, pin_memory: bool
    ) -> dict[Any, torch.Tensor]:
        """Return memory for each tensor, side by side; allocate more if there is too little."""
        nbytes = [_aligned(source.nbytes) for source in sources.values()]
        lengths, starts = in_pieces(nbytes) if pin_memory else _in_one_piece(nbytes)
        fits = len(self._pieces) >= len(lengths) and all(
            held.numel() >= length and (held.is_pinned() or not pin_memory)
            for held, length in zip(self._pieces, lengths, strict=False)
        )
        if not fits:
            self._places = {}
            self._pieces = []
            self._pieces = [
                torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
                for length in lengths
            ]
        places: dict[Any, torch.Tensor] = {}
        for (identity, source), (number, start) in zip(sources.items(), starts, strict=True):
            flat = self._pieces[number][start : start + source.nbytes].view(source.dtype)
            places[identity] = flat.view(source.shape)
        return places


def _in_one_piece(lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the length of one piece of memory, and where in it everything starts."""
    stops = [*accumulate(lengths)]
    return stops[-1:], [(0, stop - n) for stop, n in zip(stops, lengths, strict=True)]


def in_pieces(lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the lengths of pieces of memory, and in which of them, and where, everything starts.

    See [Note: pieces].
    """
    pieces: list[int] = []
    starts: list[tuple[int, int]] = []
    filled, left = 0, sum(lengths)
    for length in lengths:
        if not pieces or filled + length > pieces[-1]:
            # The largest power of two that is filled, or the smallest for what comes next.
            longest = 1 << (max(left, 1).bit_length() - 1)
            pieces.append(max(longest, 1 << max(length - 1, 0).bit_length(), _MIN_PIECE_NBYTES))
            filled = 0
        starts.append((len(pieces) - 1, filled))
        filled += length
        left -= length
    return pieces, starts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_needed(shard: LocalShard) -> bool:
    # What every rank holds whole is compared, and written by all together.
    return shard.layout.is_first_replica or shard.layout.is_whole


def _placed(shard: LocalShard, copy: torch.Tensor | None) -> LocalShard:
    return shard if copy is None else shard._replace(local=copy)


def _emptied(shard: LocalShard) -> LocalShard:
    """Return a shard that others write, without its memory."""
    if not shard.local.numel():
        return shard
    return shard._replace(local=shard.local.new_empty(0), layout=replace(shard.layout, boxes=()))
