"""Save while training goes on: copy the state aside, then write the copy from a thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from ._boxes import Part
from ._group import DEFAULT_TIMEOUT, Ranks, separate_ranks
from ._save import Snapshot, snapshot, write_checkpoint
from ._target import Layout, target_of
from .exceptions import CheckpointError

_ALIGNMENT = 64


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
        self._ranks: Ranks = separate_ranks(timeout)
        self._stage = _Stage()
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        # Runs at the end of the process at the latest: a failed save never goes unnoticed.
        weakref.finalize(self, _complain, self._outcome)

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written by this rank."""
        return self._thread is not None and self._thread.is_alive()

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
        layout: Layout | None = None,
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
        target = target_of(path, layout=layout, keep_last=keep_last)
        self.wait()
        taken: Snapshot | None = None
        failure: Exception | None = None
        try:
            taken = self._stage.copy(snapshot(state, self._ranks))
        except Exception as error:
            failure = error

        def take() -> Snapshot:
            if failure is not None:
                raise failure
            assert taken is not None
            return taken

        outcome, ranks = self._outcome, self._ranks
        outcome.written_nbytes = 0

        def work() -> None:
            try:
                write_checkpoint(target, take, ranks, progress=outcome.add_written)
            except BaseException as error:
                outcome.error = error

        self._thread = threading.Thread(target=work, name="vescale-ckpt-save")
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: If it failed, on any rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._outcome.error = self._outcome.error, None
        if isinstance(error, CheckpointError):
            raise type(error)(f"the save in the background failed: {error}") from error
        if error is not None:
            raise error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()


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
            f"the last save in the background failed, and nobody has asked: {outcome.error}"
        ) from outcome.error


class _Stage:
    """Host memory that holds a copy of this rank's shards."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, taken: Snapshot) -> Snapshot:
        """Return a snapshot whose tensors lie in this memory; overwrites the one before."""
        sources: dict[Any, torch.Tensor] = {}
        for part in taken.parts.values():
            if _is_needed(part):
                sources.setdefault(part.identity, part.local)
        offsets: list[int] = []
        total = 0
        for source in sources.values():
            offsets.append(total)
            total += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(source.is_cuda for source in sources.values())
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies: dict[Any, torch.Tensor] = {}
        for (identity, source), offset in zip(sources.items(), offsets, strict=True):
            flat = self._memory[offset : offset + source.nbytes].view(source.dtype)
            copies[identity] = flat.view(source.shape).copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return Snapshot(
            taken.encoded,
            {key: _with_copy(part, copies) for key, part in taken.parts.items()},
        )


def _is_needed(part: Part) -> bool:
    # What every rank holds whole is compared, and written by all together.
    return part.identity is not None and (part.layout.is_first_replica or part.layout.is_whole)


def _with_copy(part: Part, copies: Mapping[Any, torch.Tensor]) -> Part:
    if part.identity is None:
        return part
    if not _is_needed(part):
        layout = replace(part.layout, boxes=())
        return part._replace(local=part.local.new_empty(0), layout=layout)
    return part._replace(local=copies[part.identity])
