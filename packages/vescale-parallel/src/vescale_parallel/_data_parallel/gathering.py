"""A gather of a group's parameters that may be under way while others compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import CollectiveWork, start_all_gather
from vescale_parallel._torch_private import version_of

from .shard_rows import GatheredRows
from .side_stream import SideStream


class Gathering:
    """Gathers some rows: :meth:`start`, then :meth:`finish` or :meth:`drop`.

    Args:
        rows: Those of the parameters' shards.
        sources: What programs write to who change the shards.
        group: The ranks that have them; None if this rank has all.
        stream: Where a GPU packs them and sends them from.
        look: Is told whose rows arrived.
    """

    def __init__(
        self,
        rows: Sequence[GatheredRows],
        sources: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        stream: SideStream,
        look: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._rows = rows if group is not None else ()
        self._sources = sources
        self._group, self._stream, self._look = group, stream, look
        self._works: list[CollectiveWork] | None = None
        self._versions: list[int] = []

    @property
    def is_under_way(self) -> bool:
        """Whether it was started and is neither finished nor dropped."""
        return self._works is not None

    def start(self) -> None:
        """Send this rank's shards as they are now. Every rank must call this."""
        self._versions = self._versions_now()
        if self._group is None:
            self._works = []
            return
        for rows in self._rows:  # memory of the stream that computes; see [Note: streams]
            rows.allocate()
        with self._stream.section():
            self._works = [self._send(rows, self._group) for rows in self._rows]

    def finish(self) -> None:
        """Fill the whole parameters, whose shards are sent now if they were not, or changed."""
        if self._works is not None and self._versions != self._versions_now():
            self.drop()
        if self._works is None:
            self.start()
        self._end(fills=True)

    def drop(self) -> None:
        """Wait for what is not needed."""
        self._end(fills=False)

    def _send(self, rows: GatheredRows, group: dist.ProcessGroup) -> CollectiveWork:
        rows.pack()
        return start_all_gather(rows.sent, group, out=rows.rows)

    def _end(self, *, fills: bool) -> None:
        works, self._works = self._works or (), None
        for rows, work in zip(self._rows, works, strict=True):
            work.wait()
            try:
                if fills:
                    rows.unpack()
                self._look(rows.tags, rows.expected_tags)
            finally:
                rows.release()

    def _versions_now(self) -> list[int]:
        return [*map(version_of, self._sources)]
