"""Note which random numbers a forward draws, and in which call of which module."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._trace.random_ops import DrawMode

from .fake_run import Listener, Operator
from .memory_order import Order, memory_order
from .random_ops import drawn_shape, is_draw


@dataclass(frozen=True)
class NotedDraw:
    """One draw.

    Attributes:
        fqn: The innermost module that was running.
        call: Which call of that module it was.
        index: Which draw within the call.
        function: What drew.
        shape: Of what was drawn.
        order: In which its dims follow each other in memory.
    """

    fqn: str
    call: int
    index: int
    function: str
    shape: tuple[int, ...]
    order: Order


class DrawNotes(Listener):
    """Notes the draws of a model that runs to see, or of a run that it listens to."""

    def __init__(self) -> None:
        self.draws: list[NotedDraw] = []
        self._running: list[tuple[str, int]] = []
        self._num_calls: dict[str, int] = {}
        self._num_draws: dict[tuple[str, int], int] = {}

    def follow(self, model: nn.Module) -> None:
        """Keep in mind from now on which module is running."""
        for fqn, module in model.named_modules():
            self._follow(fqn, module)

    def watch(self, model: nn.Module) -> None:
        """Note from now on."""
        self.follow(model)
        forward = model.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Noting(self):
                return forward(*args, **kwargs)

        model.forward = run

    def repeat(self, first: str, others: Sequence[str]) -> None:
        """Add that modules drew what an equal one drew."""
        below = [draw for draw in self.draws if f"{draw.fqn}.".startswith(f"{first}.")]
        for other in others:
            self.draws += [replace(d, fqn=other + d.fqn.removeprefix(first)) for d in below]

    def note(self, func: Any, args: tuple[Any, ...]) -> NotedDraw:
        """Add a draw, and return it."""
        fqn, call = self._running[-1]
        index = self._num_draws.get((fqn, call), 0)
        self._num_draws[fqn, call] = index + 1
        shape, order = drawn_shape(func, args), drawn_order(func, args)
        self.draws.append(NotedDraw(fqn, call, index, str(func), shape, order))
        return self.draws[-1]

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = self._num_calls.get(fqn, 0)
        self._num_calls[fqn] = call + 1
        self._running.append((fqn, call))

    def left(self, fqn: str, output: Any) -> None:
        self._running.pop()

    def raised(self, fqn: str) -> None:
        self._running.pop()

    def operator(self, ran: Operator) -> None:
        if is_draw(ran.func, ran.args, ran.kwargs):
            self.note(ran.func, ran.args)

    def _follow(self, fqn: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: Any) -> None:
            self.entered(fqn, (), {})

        def after(_: nn.Module, args: Any, output: Any) -> None:
            self.left(fqn, output)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)


def drawn_order(func: Any, args: tuple[Any, ...]) -> Order:
    """Return the order in memory of what an operator draws, as :func:`drawn_shape`."""
    shape = drawn_shape(func, args)
    if isinstance(args[0], Tensor) and args[0].shape == shape:
        return memory_order(args[0])
    return tuple(dim for dim, length in enumerate(shape) if length > 1)


class _Noting(DrawMode):
    def __init__(self, notes: DrawNotes) -> None:
        super().__init__()
        self._notes = notes

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._notes.note(func, args)
        if not isinstance(args[0], Tensor) and drawn_shape(func, args) == ():
            # Code that decides by a random number, such as to leave out a layer, needs a
            # value; by custom a layer is left out if the number is small.
            return torch.tensor(1.0)
        return func(*args, **kwargs)
