"""The ranks that save or load together, and how an error on one becomes an error on all.

Control messages are small JSON texts over a gloo group of our own: the default group may be
NCCL's, and traffic of the training step on it must not meet ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .exceptions import CheckpointError, CorruptCheckpointError, MismatchError

# Ranks wait for the slowest writer, so this bounds an imbalance, not a duration.
DEFAULT_TIMEOUT = timedelta(minutes=30)
_HEAD_NBYTES = 1 << 10

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[timedelta, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)

_CLASSES: dict[str, type[CheckpointError]] = {
    cls.__name__: cls for cls in (CheckpointError, CorruptCheckpointError, MismatchError)
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of the default process group, or this process alone.

    Attributes:
        rank: Index of this process.
        size: Number of processes.
        group: The gloo group that carries control messages; None for one process.
        timeout: How long ranks wait for one another.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    timeout: timedelta = DEFAULT_TIMEOUT

    def meet(self) -> None:
        """Wait until all ranks are here. Every rank must call.

        Raises:
            CheckpointError: If some are not here in time; on rank 0 it names them.
        """
        if self.group is not None:
            with self._contact():
                dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)

    def all_gather(self, message: Any) -> list[Any]:
        """Return the JSON-able messages of all ranks, in rank order. Every rank must call."""
        if self.group is None:
            return [message]
        text = json.dumps(message).encode()
        with self._contact():
            # Most messages are short: their length and all of them go in one request.
            heads = self._gather(len(text).to_bytes(8) + text[: _HEAD_NBYTES - 8], _HEAD_NBYTES)
            lengths = [int.from_bytes(head[:8]) for head in heads]
            texts = [head[8 : 8 + length] for head, length in zip(heads, lengths, strict=True)]
            if max(lengths) > _HEAD_NBYTES - 8:
                texts = self._gather(text, max(lengths))
        return [json.loads(t[:length]) for t, length in zip(texts, lengths, strict=True)]

    def reduce(
        self, words: npt.NDArray[np.signedinteger[Any]], operation: dist.ReduceOp.RedOpType
    ) -> None:
        """Combine ``words`` of all ranks element by element, in place. Every rank must call."""
        if self.group is not None:
            with self._contact():
                dist.all_reduce(torch.from_numpy(words), operation, group=self.group)

    def exchange(
        self,
        outgoing: npt.NDArray[np.uint8],
        sent: Sequence[int],
        incoming: npt.NDArray[np.uint8],
        received: Sequence[int],
    ) -> None:
        """Send every rank a stretch of ``outgoing``. Every rank must call.

        Args:
            outgoing: What to send, in rank order.
            sent: How many bytes of it go to each rank.
            incoming: Where to put what comes, in rank order.
            received: How many bytes come from each rank.
        """
        with self._contact():
            dist.all_to_all_single(
                torch.from_numpy(incoming),
                torch.from_numpy(outgoing),
                list(received),
                list(sent),
                group=self.group,
            )

    def _gather(self, content: bytes, nbytes: int) -> list[bytes]:
        sent = torch.zeros(nbytes, dtype=torch.uint8)
        if content:
            sent[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        received = torch.empty(self.size, nbytes, dtype=torch.uint8)
        dist.all_gather(list(received.unbind()), sent, group=self.group)
        return [row.numpy().tobytes() for row in received]

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Say what it means if the group cannot do its work."""
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost contact with the other ranks, one of them has died or "
                f"hangs; nothing more was committed: {error}"
            ) from error


def current_ranks(timeout: timedelta = DEFAULT_TIMEOUT) -> Ranks:
    """Return the ranks of the default process group. Every rank must call this.

    Args:
        timeout: How long ranks wait for one another.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return Ranks(0, 1, None)
    groups = _GROUPS.setdefault(world, {})
    if timeout not in groups:
        groups[timeout] = _new_group(timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), groups[timeout], timeout)


def separate_ranks(timeout: timedelta = DEFAULT_TIMEOUT) -> Ranks:
    """Return the same ranks with another group, for another thread. Every rank must call this."""
    ranks = current_ranks(timeout)
    return ranks if ranks.group is None else replace(ranks, group=_new_group(timeout))


def _new_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


class Step(AbstractContextManager["Step"]):
    """A part of the work after which every rank learns whether all ranks did it.

    Leaving the block is a collective: set ``message`` inside to send it along, and find the
    messages of all ranks in ``messages`` afterwards. An exception on any rank is raised on
    every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.message: Any = None
        self.messages: list[Any] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        failure = None if error is None else _describe(error)
        answers = self.ranks.all_gather([failure, self.message])
        failures = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0]}
        if failures:
            raise _combined(failures, self.ranks) from error
        self.messages = [answer[1] for answer in answers]


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, CheckpointError):
        return type(error).__name__, str(error)
    return CheckpointError.__name__, f"{type(error).__name__}: {error}"


def _combined(failures: dict[int, Sequence[str]], ranks: Ranks) -> CheckpointError:
    by_text: dict[str, list[int]] = {}
    for rank, (_, text) in failures.items():
        by_text.setdefault(text, []).append(rank)
    cls = _CLASSES[next(iter(failures.values()))[0]]
    if ranks.size == 1:
        return cls(next(iter(by_text)))
    lines = [f"{text} (on {name_ranks(where)})" for text, where in by_text.items()]
    return cls("\n".join(lines))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2", shortened when there are many."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
