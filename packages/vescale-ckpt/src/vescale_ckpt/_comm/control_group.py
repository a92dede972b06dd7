"""The control group: the ranks that save or load together; an error on one is one on all.

Control messages are small JSON texts over a gloo group of our own: the default group may be
NCCL's, and traffic of the training step on it must not meet ours.

[Note: told errors]
Where ranks work on their own between two collectives, whatever happened is exchanged afterwards,
see AllOrNone. But one that fails where the others go on to a collective cannot come to that. It
writes its error to the store of the process group and closes its connections. The others, whose
collective fails at once because of that, look there, raise the same error, and close theirs. The
next save or load makes a new group; since all of it ends with a collective, every rank has heard.
Ranks that lose contact, because one was interrupted or did not come in time, close theirs as well:
once all are back, the next save or load works again.
"""

from __future__ import annotations

import atexit
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vescale_ckpt._torch_private import Store, prefixed, store_of
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError, MismatchError

from .missing_ranks import Arrivals

# Ranks wait for the slowest writer, so this bounds an imbalance, not a duration.
DEFAULT_TIMEOUT = timedelta(minutes=30)
_HEAD_NBYTES = 1 << 10

_MAX_PATIENCE = timedelta(seconds=1)

_CLASSES: dict[str, type[CheckpointError]] = {
    cls.__name__: cls for cls in (CheckpointError, CorruptCheckpointError, MismatchError)
}


class Channel:
    """The group that some ranks talk over.

    Attributes:
        process_group: The group; None once it is closed.
        common: The last error that all of the ranks raise.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self.common: BaseException | None = None

    def close(self) -> None:
        """Close the connections to all ranks."""
        process_group, self.process_group = self.process_group, None
        # The process that ends has no default group any more, and no connections.
        if process_group is not None and dist.is_initialized():
            dist.destroy_process_group(process_group)


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """All ranks of the default process group, or this process alone.

    Attributes:
        rank: Index of this process.
        size: Number of processes.
        group: The gloo group that carries control messages; None for one process.
        timeout: How long ranks wait for one another.
        arrivals: Who has come to the collectives of the group; None for one process.
    """

    rank: int
    size: int
    group: Channel | None
    timeout: timedelta = DEFAULT_TIMEOUT
    arrivals: Arrivals | None = None

    def meet(self) -> None:
        """Wait until all ranks are here, or raise which are not. Every rank must call."""
        if self.group is not None:
            with self._contact("the first barrier"):
                self._finish(dist.barrier(self._process_group, async_op=True))

    def all_gather(self, message: Any) -> list[Any]:
        """Return the JSON-able messages of all ranks, in rank order. Every rank must call."""
        if self.group is None:
            return [message]
        text = json.dumps(message).encode()
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
            with self._contact("a reduction"):
                # Nobody but _finish may hold the work, which holds connections.
                self._finish(
                    dist.all_reduce(
                        _lent(words), operation, group=self._process_group, async_op=True
                    )
                )

    def all_to_all(
        self,
        outgoing: npt.NDArray[np.uint8],
        sent: Sequence[int],
        incoming: npt.NDArray[np.uint8],
        received: Sequence[int],
    ) -> None:
        """Send every rank a stretch of ``outgoing``. Every rank must call.

        ``sent`` and ``received`` count the bytes that go to and come from each rank, in rank
        order.
        """
        with self._contact("an exchange of bytes"):
            self._finish(
                dist.all_to_all_single(
                    _lent(incoming),
                    _lent(outgoing),
                    list(received),
                    list(sent),
                    group=self._process_group,
                    async_op=True,
                )
            )

    def _gather(self, content: bytes, nbytes: int) -> list[bytes]:
        sent = np.zeros(nbytes, dtype=np.uint8)
        sent[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        received = np.empty((self.size, nbytes), dtype=np.uint8)
        with self._contact("an exchange of messages"):
            rows = [_lent(row) for row in received]
            self._finish(
                dist.all_gather(rows, _lent(sent), group=self._process_group, async_op=True)
            )
        return [row.tobytes() for row in received]

    @contextmanager
    def _contact(self, name: str) -> Iterator[None]:
        """Say what it means if a collective fails."""
        assert self.arrivals is not None
        self.arrivals.begin()
        try:
            yield
        except RuntimeError as error:
            told = self.arrivals.told(_patience(self.timeout))
            if told is None:
                lost = _lost_contact(self, name, error)
                self.close()
                raise lost from error
            self.arrivals.has_given_up = True
            raise self._closed(*json.loads(told)) from error

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None
        assert self.arrivals is not None
        with suppress(RuntimeError):
            work.wait(_patience(self.timeout))
            return
        # It takes long or has failed, and then fails again.
        self.arrivals.note()
        try:
            work.wait()
        finally:
            work = None

    @property
    def _process_group(self) -> dist.ProcessGroup:
        assert self.group is not None
        if self.group.process_group is None:
            raise RuntimeError("the connections were closed after an error")
        return self.group.process_group

    @property
    def communicates_on_one_thread(self) -> bool:
        """Whether ranks are threads themselves, and so cannot save in the background."""
        process_group = None if self.group is None else self.group.process_group
        return getattr(process_group, "is_for_one_thread", False)

    @property
    def is_closed(self) -> bool:
        """Whether there are no connections any more; see [Note: told errors]."""
        return self.group is not None and self.group.process_group is None

    def common(self, error: CheckpointError) -> CheckpointError:
        """Return an error that every rank is about to raise, so that nobody has to be told."""
        if self.group is not None:
            self.group.common = error
        return error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise what this rank alone raises in the block on every rank, at once.

        See [Note: told errors]. The block, or one around it, has to end with a collective.
        """
        try:
            yield
        except Exception as error:
            if self.group is None or self.arrivals is None:
                raise
            if self.group.common is error or self.arrivals.has_given_up:
                raise
            kind, text = _describe(error)
            told = json.dumps([self.rank, kind, text])
            self.arrivals.tell(told, _patience(self.timeout))
            raise self._closed(self.rank, kind, text) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections: no other rank waits for this one any more."""
        if self.group is not None:
            self.group.close()

    def _closed(self, rank: int, kind: str, text: str) -> CheckpointError:
        """Close the connections and return the error of a rank."""
        self.close()
        return self.common(_combined({rank: (kind, text)}, self))


def _patience(timeout: timedelta) -> timedelta:
    """Return after what time ranks note that they are waiting; see [Note: arrivals]."""
    return min(_MAX_PATIENCE, timeout / 4)


def _lost_contact(ranks: ControlGroup, name: str, error: Exception) -> CheckpointError:
    assert ranks.arrivals is not None
    # Twice: whoever came just before the first rank gave up has not waited for long yet.
    missing = ranks.arrivals.missing(2 * _patience(ranks.timeout))
    if missing is None:
        reason = (
            "the store of the process group does not answer either; the process that serves it, "
            "the launcher or rank 0, has died or hangs"
        )
    elif missing:
        have_died = "has died or hangs" if len(missing) == 1 else "have died or hang"
        reason = f"{name_ranks(missing)} {have_died} before {name}"
    else:
        reason = f"all of them have come to {name}, where a connection broke"
    return CheckpointError(
        f"rank {ranks.rank} lost contact with the other ranks: {reason}; nothing more was "
        f"committed: {error}"
    )


def current_control_group(timeout: timedelta = DEFAULT_TIMEOUT) -> ControlGroup:
    """Return the ranks of the default process group, or raise which do not come in time.

    Every rank must call this.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or dist.get_world_size() == 1:
        return ControlGroup(0, 1, None)
    world = _WORLDS.get(group) or _WORLDS.setdefault(group, _World.of(group))
    if timeout not in world.made or world.made[timeout].is_closed:
        world.made[timeout] = world.make(timeout)
    return world.made[timeout]


def separate_control_group(timeout: timedelta = DEFAULT_TIMEOUT) -> ControlGroup:
    """Return the same ranks with another group, for another thread. Every rank must call this."""
    ranks = current_control_group(timeout)
    world = _WORLDS.get(dist.group.WORLD) if dist.group.WORLD is not None else None
    return ranks if world is None else world.make(timeout)


@dataclass(frozen=True, slots=True)
class _World:
    """A default process group.

    Attributes:
        store: Its store, by a connection of our own.
        numbers: Numbers our groups, which all ranks make in the same order.
        made: The ranks for each timeout.
    """

    store: Store
    numbers: Iterator[int] = field(default_factory=itertools.count)
    made: dict[timedelta, ControlGroup] = field(default_factory=dict[timedelta, ControlGroup])

    @staticmethod
    def of(group: dist.ProcessGroup) -> _World:
        return _World(store_of(group))

    def make(self, timeout: timedelta) -> ControlGroup:
        """Return all ranks with a new group."""
        store = prefixed(f"vescale-ckpt/{next(self.numbers)}", self.store)
        rank, size = dist.get_rank(), dist.get_world_size()
        arrivals = Arrivals(store, rank, size)
        ranks = ControlGroup(rank, size, None, timeout, arrivals)
        arrivals.begin()
        arrivals.note()
        try:
            group = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise _lost_contact(ranks, "the making of a process group", error) from error
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        return replace(ranks, group=Channel(group))


_WORLDS: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()

# What gloo's threads use, by id, until they let go of it; see [Note: exit].
_LENT: WeakValueDictionary[int, npt.NDArray[Any]] = WeakValueDictionary()


def _lent(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor for a collective, over the memory of ``array``."""
    view = array.view()
    _LENT[id(view)] = view
    return torch.from_numpy(view)


@atexit.register
def _take_back() -> None:
    """Wait for gloo's threads to let go of what they used.

    [Note: exit]
    Whoever waits for a collective goes on slightly before gloo's thread drops the tensors. These
    have Python objects: where Python has ended by then, dropping them aborts the process.
    """
    deadline = time.monotonic() + _MAX_PATIENCE.total_seconds()
    while _LENT and time.monotonic() < deadline:
        time.sleep(1e-3)


class AllOrNone(AbstractContextManager["AllOrNone"]):
    """A part of the work after which every rank learns whether all ranks did it.

    Leaving the block is a collective: set ``message`` inside to send it along, and find the
    messages of all ranks in ``messages`` afterwards. An exception on any rank is raised on
    every rank, and ``has_failed`` is true then: all ranks know that they must not go on.
    """

    def __init__(self, ranks: ControlGroup) -> None:
        self.ranks = ranks
        self.message: Any = None
        self.messages: list[Any] = []
        self.has_failed = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        arrivals = self.ranks.arrivals
        if error is not None and arrivals is not None and arrivals.has_given_up:
            return
        failure = None if error is None else _describe(error)
        answers = self.ranks.all_gather([failure, self.message])
        failures = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0]}
        if failures:
            self.has_failed = True
            raise self.ranks.common(_combined(failures, self.ranks)) from error
        self.messages = [answer[1] for answer in answers]


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, CheckpointError):
        return type(error).__name__, str(error)
    return CheckpointError.__name__, f"{type(error).__name__}: {error}"


def _combined(failures: dict[int, Sequence[str]], ranks: ControlGroup) -> CheckpointError:
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
