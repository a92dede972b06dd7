"""A gather of a group's parameters that may be under way while others compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import CollectiveWork, start_all_gather
from vescale_parallel._mesh.side_stream import SideStream
from vescale_parallel._parameters.flat_shards import FlatShards
from vescale_parallel._parameters.sent_shards import SentShards
from vescale_parallel._torch_private import version_of


class Gathering:
    """Gathers some flat buffers: :meth:`start`, then :meth:`finish` or :meth:`drop`.

    Args:
        flat: Those of the parameters.
        sources: What programs write to who change this rank's shards.
        group: The ranks that have the others; None if this rank has all.
        stream: Where a GPU casts them and sends them from.
        begin: Is told of each gather before it begins, with the group, and whether it is one that
            was under way when this rank's ranges were written.
        sent: What is sent of ranges on the host; None of those that the device has.
    """

    def __init__(
        self,
        flat: Sequence[FlatShards],
        sources: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        stream: SideStream,
        begin: Callable[[dist.ProcessGroup, bool], None],
        sent: SentShards | None = None,
    ) -> None:
        self._flat, self._sources, self._sent = flat, sources, sent
        self._group, self._stream, self._begin = group, stream, begin
        self._works: list[CollectiveWork] | None = None
        self._brought: Any = None  # the event behind copies from the host
        self._versions: list[int] = []
        self._is_written = False  # maybe, by a collective that was not waited for

    @property
    def is_under_way(self) -> bool:
        """Whether it was started and is neither finished nor dropped."""
        return self._works is not None

    def start(self) -> None:
        """Send this rank's ranges as they are now. Every rank must call this."""
        self._start(again=False)

    def _start(self, *, again: bool) -> None:
        group = self._group if self._flat else None
        if group is not None:
            self._begin(group, again)
        self._versions, self._works = self._versions_now(), []
        if group is None and self._sent is None:
            return
        for shards in self._flat:  # memory of the stream that computes; see [Note: streams]
            shards.allocate_whole()
        self._is_written = True
        with self._stream.section():
            if self._sent is not None:
                self._sent.update()
            for shards in self._flat:
                own = shards.sent if self._sent is None else self._sent.bring(shards)
                if group is not None:  # what is sent is kept alive by the work
                    self._works.append(start_all_gather(own, group, out=shards.whole))
            self._brought = None if self._sent is None else self._stream.mark()

    def finish(self) -> None:
        """Fill the buffers, with ranges that are sent now if they were not, or changed."""
        again = self._works is not None and self._versions != self._versions_now()
        if again:
            self._wait()
        if self._works is None:
            self._start(again=again)
        self._wait()

    def gather_sent(self, replicas: dist.ProcessGroup) -> None:
        """Bring what this rank sends up to date with what replicas have. Each must call this."""
        for shards in self._flat:
            own = shards.own.to(shards.compute_dtype)
            start_all_gather(own, replicas, out=shards.rows_of_replicas).wait()

    def drop(self) -> None:
        """Wait for what is not needed, and give its memory back."""
        self._wait()
        self.free()

    def free(self) -> None:
        """Give back the memory of the buffers, unless a collective may still write to it."""
        if not self._is_written:
            for shards in self._flat:
                shards.release_whole()

    def _wait(self) -> None:
        works, self._works = self._works or (), None
        for work in works:
            work.wait()
        self._stream.join(self._brought)
        self._is_written, self._brought = False, None

    def _versions_now(self) -> list[int]:
        return [*map(version_of, self._sources)]
