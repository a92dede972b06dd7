"""Notes what one rank does, as it does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from vescale._torch_private import is_in_backward
from vescale_dtensor import CommCounter, Communication, listening_to_ranges

from .span import PASSES, Span, span_of_range

Clock = Callable[[], int]
# Ranges in which modules run backward.
_AROUND_BACKWARD = frozenset(("pipeline", *PASSES))


class Recorder:
    """Collects the spans of this rank while it is open.

    What is sent is told just before its range begins, by the same thread; so the range takes the
    newest collective that was told and has its name.

    Attributes:
        spans: What has ended, in that order.
        is_open: Whether spans are still taken.
        ended: Called when a range ends in which modules run backward.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[Span] = []
        self.is_open = False
        self.ended: Callable[[], None] = lambda: None
        self._counter = CommCounter()
        self._home = threading.get_ident()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take spans inside the block."""
        with self._counter, listening_to_ranges(self._begin):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False
                self._take_unseen()

    def _begin(self, words: tuple[object, ...], nbytes: int) -> Callable[[], None]:
        event = self._told(words) if self._counter.events else None
        if event is not None:
            nbytes = event.nbytes
        # A thread beside the program; autograd has one of its own on a GPU, and runs in it then.
        is_beside = threading.get_ident() != self._home and not is_in_backward()
        ends_passes = words[0] in _AROUND_BACKWARD
        begin = self.clock()

        def end() -> None:
            if not self.is_open:
                return
            if ends_passes:
                self.ended()
            span = span_of_range(words, begin, self.clock(), nbytes=nbytes, is_beside=is_beside)
            self.spans.append(span)

        return end

    def _told(self, words: tuple[object, ...]) -> Communication | None:
        """Return what was told of the collective that begins; others had no range."""
        events = self._counter.events
        for at in reversed(range(len(events))):
            if len(words) > 2 and words[0] == events[at].kind and words[-1] == events[at].over:
                event = events.pop(at)
                self._take_unseen()
                return event
        return None

    def _take_unseen(self) -> None:
        """Note collectives that were counted and had no range, as spans of no length."""
        now = self.clock()
        for event in self._counter.events:
            span = span_of_range(
                (event.kind, "over", event.over), now, now, nbytes=event.nbytes, is_beside=False
            )
            self.spans.append(span)
        self._counter.events.clear()


def shifted(span: Span, shift: Callable[[int], int]) -> Span:
    """Return a span on another clock."""
    return replace(span, begin=shift(span.begin), end=shift(span.end))
