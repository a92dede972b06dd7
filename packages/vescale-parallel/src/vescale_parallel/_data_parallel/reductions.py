"""Reductions of gradients that are under way while backward computes the next ones.

[Note: reductions under way] A reduction starts a collective, and goes on when a later one starts
or backward ends: it waits, adds in rank order, and may start another. So the order in which a rank
starts collectives depends on the order of reductions alone, which is that of all ranks, and never
on when one arrives. On a GPU nothing waits on the host: a reduction is asked for as a whole, on a
stream of its own, and what goes on later is only that compute waits for it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from vescale_dtensor import CollectiveWork
from vescale_parallel._mesh.side_stream import SideStream

ReductionOrder = Literal["ordered", "library"]
# Gives each collective that it started, and goes on once it was waited for; gives None when all
# is done but that the memory that it used is let go of.
Reduction = Generator[CollectiveWork | None, None, None]


@dataclass(eq=False)
class RunningSum:
    """Gradients of several reductions, added up in order.

    One that is on its way to the host is added when the next one is, a micro-batch later, so that
    the host does not wait for it while backward computes.
    """

    _sum: Tensor | None = None
    _last: Tensor | None = None
    _arrived: Any = None

    def add(self, term: Tensor, arrived: Any = None) -> None:
        """Add a tensor, which is taken over; behind an event, if it is on its way."""
        if self._last is not None:
            self.total()
        self._last, self._arrived = term, arrived
        if arrived is None:
            self.total()

    def total(self) -> Tensor:
        """Return the sum, when everything has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        last, self._last, self._arrived = self._last, None, None
        if self._sum is None:
            self._sum = last
        elif last is not None:
            self._sum.add_(last)
        assert self._sum is not None
        return self._sum


@dataclass(eq=False)
class _UnderWay:
    reduction: Reduction
    work: CollectiveWork | None
    event: Any = None

    def wait(self, stream: SideStream) -> None:
        if self.work is not None:
            self.work.wait()
        stream.join(self.event)


@dataclass(eq=False)
class Reductions:
    """The reductions of a model's gradients that are under way, the oldest first.

    Attributes:
        order: In rank order, or as the backend likes.
        stream: Where a GPU does them.
    """

    order: ReductionOrder = "ordered"
    stream: SideStream = field(default_factory=lambda: SideStream(None))
    _under_way: list[_UnderWay] = field(default_factory=list[_UnderWay])

    def start(self, reduction: Reduction) -> None:
        """Start a reduction; :meth:`advance` and :meth:`finish` go on with it."""
        if not self.stream.exists:
            self._under_way.append(_UnderWay(reduction, next(reduction)))
            return
        with self.stream.section():
            while (work := next(reduction)) is not None:
                work.wait()
            event = self.stream.mark()
        self._under_way.append(_UnderWay(reduction, None, event))

    def advance(self) -> None:
        """Have every reduction under way wait for its collective, and go on to the next."""
        # One that raises is under way no more.
        before, self._under_way = self._under_way, []
        while before:
            each = before.pop(0)
            try:
                each.wait(self.stream)
                each.work = None if each.work is None else next(each.reduction)
                if each.work is None:
                    next(each.reduction, None)
                else:
                    self._under_way.append(each)
            except BaseException:
                self._under_way += before
                raise

    def finish(self) -> None:
        """Have all reductions done."""
        while self._under_way:
            self.advance()
        self.stream.settle()

    def abandon(self) -> None:
        """Wait for what a failed backward pass left, whose memory nobody may use before."""
        left, self._under_way = self._under_way, []
        for each in left:
            each.wait(self.stream)
            each.reduction.close()
        self.stream.settle()
