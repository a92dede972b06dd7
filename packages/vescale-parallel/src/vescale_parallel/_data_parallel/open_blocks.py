"""The blocks whose backward pass is under way, and passes that run while others wait.

[Note: passes within passes] A hook, or a function with a backward of its own, may run a pass while
another waits: torch.autograd.grad of what a block computed, once or until a solver converges, as
implicit differentiation does. Such a pass enters blocks and leaves them; it must leave those open
in which the waiting one stands, and which go on when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vescale_parallel._torch_private import backward_pass, call_after_backward

from .param_group import ParamGroup


class OpenBlocks:
    """The blocks in which backward passes stand, at most one of each pass.

    Args:
        leave: Is told which blocks a pass has left, before it enters another or at its end.
    """

    def __init__(self, leave: Callable[[list[ParamGroup]], None]) -> None:
        self._leave = leave
        self._latest: list[ParamGroup] = []  # of the innermost pass
        self._running: int | None = None  # its number, until it ends
        self._waiting: list[tuple[list[ParamGroup], int]] = []

    def __iter__(self) -> Iterator[ParamGroup]:
        for blocks, _ in self._waiting:
            yield from blocks
        yield from self._latest

    def forget(self) -> None:
        """Have none be open, of no pass."""
        self._latest, self._running, self._waiting = [], None, []

    def enter(self, block: ParamGroup) -> bool:
        """Leave what the pass was in; return whether the block was closed till now."""
        now = backward_pass()
        if self._running is not None and self._running != now:
            self._waiting.append((self._latest, self._running))
            self._latest, self._running = [], now
            call_after_backward(self._resume)
        elif self._running is None:
            self._running = now
            call_after_backward(self._end)
        self.leave()
        was_closed = block not in self
        if was_closed:
            self._latest = [block]
        return was_closed

    def leave(self) -> None:
        """Leave what the innermost pass is in."""
        latest, self._latest = self._latest, []
        if latest:
            self._leave(latest)

    def _end(self) -> None:
        self._running = None

    def _resume(self) -> None:
        if self._waiting:
            self.leave()
            self._latest, self._running = self._waiting.pop()
