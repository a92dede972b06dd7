"""The ranks that save or load together, and how an error on one becomes an error on all.

Control messages are small JSON texts over a gloo group of our own: the default group may be
NCCL's, and traffic of the training step on it must not meet ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .exceptions import CheckpointError, CorruptCheckpointError, MismatchError

# Ranks wait for the slowest writer, so this bounds an imbalance, not a duration.
_TIMEOUT = timedelta(minutes=30)

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

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
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def all_gather(self, message: Any) -> list[Any]:
        """Return the JSON-able messages of all ranks, in rank order. Every rank must call."""
        if self.group is None:
            return [message]
        text = json.dumps(message).encode()
        try:
            lengths = self._gather(torch.tensor([len(text)]), 1)
            longest = int(torch.cat(lengths).max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            texts = self._gather(padded, longest)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost contact with the other ranks, one of them has died or "
                f"hangs; nothing more was committed: {error}"
            ) from error
        return [
            json.loads(bytes(t[: int(n)].numpy())) for t, n in zip(texts, lengths, strict=True)
        ]

    def _gather(self, tensor: torch.Tensor, numel: int) -> list[torch.Tensor]:
        result = [torch.empty(numel, dtype=tensor.dtype) for _ in range(self.size)]
        dist.all_gather(result, tensor, group=self.group)
        return result


def current_ranks() -> Ranks:
    """Return the ranks of the default process group. Every rank must call this."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return Ranks(0, 1, None)
    if world not in _GROUPS:
        _GROUPS[world] = _new_group()
    return Ranks(dist.get_rank(), dist.get_world_size(), _GROUPS[world])


def separate_ranks() -> Ranks:
    """Return the same ranks with another group, for another thread. Every rank must call this."""
    ranks = current_ranks()
    return ranks if ranks.group is None else replace(ranks, group=_new_group())


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
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
