"""Schedules of two stages a rank that go down the ranks and back up."""

from __future__ import annotations

from vescale_parallel._plan.pipeline_schedules import StagePlacement

from .action import Action, Kind


class _Order:
    """The actions of a rank so far.

    A chunk is one of its two stages: 0 on the way down, 1 on the way up. Weight gradients that
    wait are computed in the order of their input gradients.
    """

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._counts: dict[tuple[Kind, int], int] = {}
        self._waiting: list[Action] = []

    def count(self, chunk: int) -> int:
        """Return how many forward passes a chunk has done."""
        return self._counts.get(("F", chunk), 0)

    def add(self, kind: Kind, chunk: int) -> None:
        """Run the next micro-batch of a chunk."""
        # Of one micro-batch there is a whole backward or an input gradient.
        counted: Kind = "F" if kind == "F" else "B"
        microbatch = self._counts.get((counted, chunk), 0)
        self._counts[counted, chunk] = microbatch + 1
        stage = self._stages[chunk]
        self.actions.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._waiting.append(Action("W", stage, microbatch))

    def add_weights(self, chunk: int | None = None) -> bool:
        """Compute the weight gradients that have waited longest, if any do; of a chunk or both."""
        wanted = self._stages if chunk is None else (self._stages[chunk],)
        found = next((each for each in self._waiting if each.stage in wanted), None)
        if found is not None:
            self._waiting.remove(found)
            self.actions.append(found)
        return found is not None


def zbv(rank: int, placement: StagePlacement, microbatches: int) -> tuple[Action, ...]:
    """Return ``zbv``. Fewer micro-batches than fill the pipeline leave out the others' passes."""
    size = placement.size
    filled = max(2 * size - 1, microbatches)
    order = _Order(placement.stages_of(rank))
    for _ in range(2 * (size - rank) - 1):
        order.add("F", 0)
    for _ in range(rank):
        order.add("F", 1)
        order.add("F", 0)
    for _ in range(size - rank):
        order.add("F", 1)
        _add_both(order, 1)
    while order.count(1) < filled:
        if order.count(0) < filled:
            order.add("F", 0)
        _add_both(order, 0)
        order.add("F", 1)
        _add_both(order, 1)
    for _ in range(rank):
        order.add("I", 0)
        order.add("I", 1)
    for _ in range(size - rank):
        order.add("I", 0)
        order.add_weights(0)
    while order.add_weights(1):
        pass
    while order.add_weights(0):
        pass
    return tuple(each for each in order.actions if each.microbatch < microbatches)


def _add_both(order: _Order, chunk: int) -> None:
    order.add("I", chunk)
    order.add_weights(chunk)


def dualpipev(rank: int, placement: StagePlacement, microbatches: int) -> tuple[Action, ...]:
    """Return ``dualpipev``, in the eight steps of its authors' code."""
    size = placement.size
    behind = size - rank - 1
    order = _Order(placement.stages_of(rank))
    for _ in range(2 * behind):
        order.add("F", 0)
    for _ in range(rank + 1):
        order.add("F", 0)
        order.add("F", 1)
    for _ in range(behind):
        _add_both(order, 1)
        order.add("F", 1)
    # Where the authors overlap a forward with the backward of another micro-batch, those are
    # neighbours here.
    for _ in range(microbatches - 2 * size + rank + 1):
        order.add("F", 0)
        order.add("B", 1)
        order.add("F", 1)
        order.add("B", 0)
    for _ in range(behind):
        order.add("B", 1)
        order.add("F", 1)
        order.add("B", 0)
    _cool_down(order, rank, size)
    return tuple(order.actions)


def _cool_down(order: _Order, rank: int, size: int) -> None:
    """Run the backwards that are left; in the second half weights wait to fill the bubble."""
    # The first of the backwards in two parts, of those that come in pairs.
    split = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for k in range(2 * (rank + 1)):
        order.add("I" if k >= split else "B", 1 - k % 2)
    for _ in range(size - rank - 1):
        order.add_weights()
        order.add("I" if split < 2 * (rank + 1) else "B", 0)
    while order.add_weights():
        pass
