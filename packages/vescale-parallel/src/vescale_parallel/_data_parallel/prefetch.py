"""Parameters of blocks are gathered while the block before them computes.

[Note: order of gathers] In what order a pass needs groups of parameters is observed, and expected
of the next pass of its kind. When a group is needed, those that are expected after it are started,
as many as the plan says. A pass may deviate: a group that is not under way is gathered at once;
one that is and was not needed is kept until it is, or the pass ends, and counts among those that
may be under way. What is started follows from what a pass needed so far and from the pass before,
which are the same on all ranks, so that ranks start collectives in one order.

[Note: groups that stay gathered] A group that a training pass is through with stays gathered until
another is needed: backward begins with what forward ended with. Or, if the plan says so, until its
backward pass. What stays is what one call has gathered: the next call lets go of it.

[Note: passes with a graph] What a backward pass with ``create_graph=True`` computes is
differentiated in another one, before that comes to any block. So from such a pass on nothing is
freed, until a pass without a graph has ended. Nor is anything started: what is not needed would be
dropped, and what is under way be read before it is there.

[Note: blocks in transforms] The same is true of a block that a transform of ``torch.func`` runs:
what it computes is differentiated, there or in backward, by passes that come to no output of the
block. So nothing is freed either, until the call's backward pass has ended, or the call that has
none.

Where they are not the same, ranks that come to the same groups by and by still exchange the same
ones, so nothing is mixed up; where they do not, the order in which gathers are started tells; see
[Note: mixed-up ranks].
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Protocol

import torch

from vescale_parallel._torch_private import is_in_backward, is_transformed


class Gatherable(Protocol):
    """A group of parameters."""

    def start_gather(self) -> None: ...

    def gather(self) -> None: ...

    def drop_gather(self) -> None: ...

    def free(self) -> None: ...


class Prefetch:
    """Has groups of parameters gathered when they are needed, and the next ones under way.

    Args:
        depth: How many may be under way besides what is gathered.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._observed: dict[Hashable, list[Gatherable]] = {}
        self._kind: Hashable = None
        self._expected: Sequence[Gatherable] = ()
        self._at = 0  # of what is expected next
        self._needed: list[Gatherable] = []
        self._gathered: set[Gatherable] = set()
        self._under_way: list[Gatherable] = []
        self._kept: set[Gatherable] = set()
        self._last: Gatherable | None = None
        # See [Note: passes with a graph]: whether there was one, and whether the last one was.
        self._holds, self._had_graph = False, False
        self._is_transformed = False  # see [Note: blocks in transforms]

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._kind is not None

    def order_of(self, kind: Hashable) -> Sequence[Gatherable]:
        """Return what the last pass of a kind needed, in order."""
        return self._observed.get(kind, ())

    def begin(self, kind: Hashable, expected: Sequence[Gatherable] = ()) -> None:
        """Begin a pass, and start what it will need first.

        Args:
            kind: Passes of one kind need the same groups.
            expected: What the first pass of a kind is expected to need.
        """
        self.abandon()
        self._kind, self._at, self._needed = kind, 0, []
        self._expected = self._observed.get(kind, expected)
        self._had_graph = False
        self._look_for_graph()
        self._start_next()

    def end(self) -> None:
        """End a pass, and drop what it did not need."""
        if self._kind is not None:
            self._observed[self._kind] = self._needed
        self._kind, self._expected, self._needed = None, (), []
        # Where it raised, ranks may wait for each other in vain: the next pass drops it then.
        if sys.exception() is None:
            self.abandon()

    def need(self, group: Gatherable) -> None:
        """Have a group gathered. Every rank must call this."""
        self._look_for_graph()
        if is_transformed() and not self._holds:
            self._holds = self._is_transformed = True
        last, self._last = self._last, None
        if last is not None and last is not group and not self._holds:
            last.free()
        if group in self._under_way:
            self._under_way.remove(group)
        if group not in self._kept and group is not last:
            group.gather()
        self._gathered.add(group)
        if self._kind is None:
            return  # a block that is called on its own
        self._needed.append(group)
        # Where the pass deviates, it may come back to what is expected.
        with contextlib.suppress(ValueError):
            self._at = self._expected.index(group, self._at) + 1
        self._start_next()

    def let_go(self, group: Gatherable) -> None:
        """Free a group's memory."""
        self._gathered.discard(group)
        self._kept.discard(group)
        if self._last is group:
            self._last = None
        if not self._holds:
            group.free()

    def leave(self, group: Gatherable, *, keeps: bool) -> None:
        """Free a group's memory later: see [Note: groups that stay gathered].

        Args:
            group: What forward is through with.
            keeps: Whether the plan says that it stays until its backward pass.
        """
        # One that raised has no backward pass.
        if self._kind is None or sys.exception() is not None:
            self.let_go(group)
        elif keeps:
            self._gathered.discard(group)
            self._kept.add(group)
        else:
            self._gathered.discard(group)
            self._last = group

    def let_go_without_backward(self, root: Gatherable) -> None:
        """Free the memory of what a forward pass without gradients has left gathered."""
        self.let_go(root)
        if self._is_transformed:
            self._holds = self._is_transformed = False
            for group in {root, *self.order_of(("forward", False))}:
                self.let_go(group)

    def let_go_of_kept(self) -> None:
        """Free what stays gathered."""
        kept, self._kept = self._kept, set()
        last, self._last = self._last, None
        for group in (*kept, *(() if last is None else (last,))):
            if not self._holds:
                group.free()

    def holds_all(self) -> bool:
        """End a backward pass: whether what it gathered stays; see [Note: passes with a graph]."""
        self._holds, self._is_transformed = self._holds and self._had_graph, False
        return self._holds

    def _look_for_graph(self) -> None:
        if is_in_backward() and torch.is_grad_enabled():
            self._holds = self._had_graph = True

    def abandon(self) -> None:
        """Drop all that is under way, and expect nothing."""
        self._gathered.clear()
        while self._under_way:
            self._under_way.pop().drop_gather()

    def _start_next(self) -> None:
        if self._holds:
            return
        for group in islice(self._upcoming(), self._depth):
            if group not in self._under_way and len(self._under_way) < self._depth:
                self._under_way.append(group)
                group.start_gather()

    def _upcoming(self) -> Iterable[Gatherable]:
        """Yield what is expected and not gathered now, each once."""
        seen = self._gathered | self._kept | {self._last}
        for group in islice(self._expected, self._at, None):
            if group not in seen:
                seen.add(group)
                yield group
