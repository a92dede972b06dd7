"""Where the generator is when a stage runs a micro-batch, on the way of one device.

[Note: draws of a pipeline] One device runs forward of one micro-batch after the other, those of
data-parallel ranks in the order of ranks. How far each moves the generator is known from a run on
tensors without values (:mod:`.forward_draws`), for every border of a module that another stage
may own. A stage sets the generator before what it draws, if it did not come there by drawing;
what the model draws outside of these modules it draws itself, on every stage. So all that a
stage draws is torch's own, and at the end of a step all ranks have one device's generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch

from vescale_dtensor.random import Point

from .forward_draws import ForwardDraws
from .host_generators import HostPass
from .moves import Moves, advanced


class StepPoints:
    """The places of the generator in one step of this rank.

    Args:
        draws: Of one micro-batch's forward.
        first: Where the first micro-batch begins.
    """

    def __init__(self, draws: ForwardDraws, first: Point) -> None:
        self.draws, self._starts = draws, [first]
        is_counted = all(isinstance(move, int) for each in draws.moves for move in each)
        self._words: list[int] | None = None
        if is_counted:
            sums = (sum(move for move in each if isinstance(move, int)) for each in draws.moves)
            self._words = [*accumulate(sums)]

    def start(self, microbatch: int) -> Point:
        """Return where a micro-batch begins, and the one before it ends."""
        if self._words is not None:
            return self._starts[0].after(microbatch * self._words[-1])
        while len(self._starts) <= microbatch:
            self._starts.append(advanced(self._starts[-1], self.draws.total))
        return self._starts[microbatch]

    def entered_on(self, stage: int, stages_of: Mapping[str, Sequence[int]]) -> set[int]:
        """Return the borders at which a stage enters a module that it runs.

        ``stages_of`` has the stage of every call of each module, or one for all of them.
        """
        found, calls = set[int](), Counter[str]()
        for border, (fqn, kind) in enumerate(self.draws.borders):
            if kind == "enter":
                stages = stages_of[fqn]
                if stages[min(calls[fqn], len(stages) - 1)] == stage:
                    found.add(border)
                calls[fqn] += 1
        return found

    def at_borders(self, microbatch: int) -> Sequence[Point]:
        """Return the place at every border, and that of the end."""
        start = self.start(microbatch)
        if self._words is not None:
            return [start.after(words) for words in self._words]
        return [*accumulate(self.draws.moves, advanced, initial=start)][1:]


class StagePass:
    """One pass of a micro-batch through a stage.

    Args:
        points: Of the step.
        microbatch: Its number among those of this rank.
        own: The borders at which this stage enters a module that it runs.
        say: Called, with where, if something draws otherwise than was seen.
        host: What places Python's generator and NumPy's.
    """

    def __init__(
        self,
        points: StepPoints,
        microbatch: int,
        own: Collection[int],
        say: Callable[[str], None],
        host: HostPass,
    ) -> None:
        self._draws, self._own, self._say, self._host = points.draws, own, say, host
        self._points = points.at_borders(microbatch)
        self._index = 0
        self._is_lost, self._is_placed, self._has_left = False, False, False
        self._held = torch.default_generator.get_state()
        self._place_before(points.start(microbatch))

    def entered(self, fqn: str) -> None:
        """A module is called that some stage owns."""
        borders, index = self._draws.borders, self._index
        if self._is_lost:
            return
        if index >= len(borders) or borders[index] != (fqn, "enter"):
            self._lose(fqn)
            return
        self._host.comes_to(index, "forward outside of the blocks", drew=True)
        point = self._points[index]
        draws = index in self._own and bool(self._draws.moves[index + 1])
        # What was drawn outside for other stages' activations, of no value here, may have been
        # drawn for another layout of them.
        if draws and not point.may_be_of(torch.default_generator.get_state()):
            self._place(point)

    def left(self, fqn: str, *, goes_on: bool) -> None:
        """It has returned; ``goes_on`` says whether forward does."""
        self._has_left = not goes_on
        if self._is_lost:
            return
        moves = self._draws.moves[self._index + 1]
        self._index += 2
        point = self._points[self._index - 1]
        self._host.comes_to(self._index - 1, repr(fqn), drew=self._index - 2 in self._own)
        if self._index - 2 in self._own:
            self._check(point, fqn)
        elif moves:
            self._is_placed = False
        if goes_on and not self._is_lost:
            self._place_before(point)

    def end(self) -> None:
        """Forward of the whole model has returned, or the stage has left it."""
        if not (self._is_lost or self._has_left) and self._index == len(self._draws.borders):
            self._check(self._points[-1], "")
            self._host.comes_to(self._index, "forward outside of the blocks", drew=True)

    def _place_before(self, point: Point) -> None:
        """Set the generator, if it is not there, to what comes until the next module is left.

        Before that is entered: a program may checkpoint it, with the state from before its call.
        """
        moves, index = self._draws.moves, self._index
        is_own = index in self._own
        if not self._is_placed and (moves[index] or (is_own and moves[index + 1])):
            self._place(point)

    def _place(self, point: Point) -> None:
        self._held = point.state()
        self._is_placed = True
        torch.default_generator.set_state(self._held)

    def _check(self, point: Point, fqn: str) -> None:
        state = torch.default_generator.get_state()
        is_right = point.may_be_of(state) if self._is_placed else torch.equal(state, self._held)
        if not is_right:
            self._lose(fqn)

    def _lose(self, fqn: str) -> None:
        self._is_lost = True
        self._say(fqn)


def repeated(point: Point, moves: Moves, times: int) -> Point:
    """Return where a generator is after so many times the same moves."""
    if all(isinstance(move, int) for move in moves):
        return point.after(times * sum(move for move in moves if isinstance(move, int)))
    for _ in range(times):
        point = advanced(point, moves)
    return point
