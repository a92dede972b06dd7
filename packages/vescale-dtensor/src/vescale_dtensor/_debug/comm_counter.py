"""Count what is communicated, so that a test can say how much a step may cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vescale_dtensor._comm.events import Communication, CommunicationKind, listening


@dataclass(frozen=True, slots=True)
class CommTotal:
    """Several collectives together.

    Attributes:
        num_collectives: How many there were.
        nbytes: Sent by this rank to others.
    """

    num_collectives: int
    nbytes: int


class CommCounter:
    """Count the collectives of this package that this rank takes part in inside a block.

    Redistributions, gathers for operators without a rule, :func:`all_reduce` and its like are
    counted, forward and backward; collectives that are called on torch directly are not. Blocks
    may be nested: each counter counts for itself. A counter that is entered again goes on
    counting. Printed, it is a table.

    Attributes:
        events: The collectives, in order.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from vescale_dtensor import CommCounter, all_gather, emulate
        >>> with emulate(4):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ...     with CommCounter() as counter:
        ...         _ = all_gather(torch.ones(8), mesh)
        >>> counter.num_collectives, counter.nbytes
        (1, 96)
        >>> print(counter)
        collective  over  ranks  dtype    calls  bytes sent
        all_gather  tp        4  float32      1          96
        total                                 1          96
    """

    def __init__(self) -> None:
        self.events: list[Communication] = []
        self._listening: AbstractContextManager[None] | None = None

    def __enter__(self) -> CommCounter:
        if self._listening is not None:
            raise RuntimeError("this counter is counting already; nest another one")
        self._listening = listening(self._hear)
        self._listening.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        assert self._listening is not None
        counting, self._listening = self._listening, None
        counting.__exit__(None, None, None)

    def _hear(self, event: Communication) -> None:
        self.events.append(event)

    @property
    def num_collectives(self) -> int:
        """How many collectives there were."""
        return len(self.events)

    @property
    def nbytes(self) -> int:
        """How many bytes this rank sent to others."""
        return sum(event.nbytes for event in self.events)

    @property
    def by_kind(self) -> Mapping[CommunicationKind, CommTotal]:
        """The totals of each kind of collective, in the order in which kinds first occurred."""
        found: dict[CommunicationKind, list[int]] = {}
        for event in self.events:
            found.setdefault(event.kind, []).append(event.nbytes)
        return {kind: CommTotal(len(nbytes), sum(nbytes)) for kind, nbytes in found.items()}

    def __str__(self) -> str:
        calls: Counter[tuple[str, ...]] = Counter()
        nbytes: Counter[tuple[str, ...]] = Counter()
        for event in self.events:
            calls[_labels(event)] += 1
            nbytes[_labels(event)] += event.nbytes
        rows = [(*labels, f"{calls[labels]:,}", f"{nbytes[labels]:,}") for labels in calls]
        total = ("total", "", "", "", f"{self.num_collectives:,}", f"{self.nbytes:,}")
        return _table([_HEADER, *rows, total])


_HEADER = ("collective", "over", "ranks", "dtype", "calls", "bytes sent")
_NUMBERS = {"ranks", "calls", "bytes sent"}


def _labels(event: Communication) -> tuple[str, ...]:
    dtype = str(event.dtype).removeprefix("torch.")
    return (event.kind, event.over, str(event.num_ranks), dtype)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for title, cell, width in zip(_HEADER, row, widths, strict=True)
        ).rstrip()
        for row in lines
    )
