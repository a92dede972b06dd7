"""A span of time of one rank, and what the ranges of a step say that it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["phases", "pipeline", "modules", "communication", "communication beside"]
PASSES = ("forward", "backward", "input gradient", "weight gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one rank did for some time.

    Attributes:
        lane: ``"phases"`` of a step, what a ``"pipeline"`` does with micro-batches, passes of
            ``"modules"``, ``"communication"`` that the program waits for, and what runs in a
            thread ``"communication beside"`` it. Spans of a lane are nested or disjoint.
        name: Of a module, its fully qualified name.
        kind: ``"forward"``, ``"backward"`` or ``"recompute"`` of a module, ``"forward"``,
            ``"backward"``, ``"input gradient"`` or ``"weight gradients"`` of a stage; the
            collective; else the name.
        begin: In nanoseconds of rank 0's clock.
        end: Likewise.
        axis: Of the mesh, of what is communicated; ``"dp_shard+cp"`` where two act as one.
        nbytes: Sent by this rank to others; where a collective is started and waited for, of its
            start.
        stage: Of the pipeline, in the lane ``"pipeline"``.
        microbatch: Likewise.
    """

    lane: Lane
    name: str
    kind: str
    begin: int
    end: int
    axis: str = ""
    nbytes: int = 0
    stage: int | None = None
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.begin) / 1e9


def span_of_range(
    words: tuple[object, ...], begin: int, end: int, *, nbytes: int, is_beside: bool
) -> Span:
    """Return the span of a range with such a name; see ``vescale_dtensor.profiler_range``."""
    name = " ".join(map(str, words))
    if len(words) == 5 and words[0] in PASSES:
        stage, microbatch = words[2], words[4]
        assert isinstance(stage, int)
        assert isinstance(microbatch, int)
        return Span(
            lane="pipeline",
            name=name,
            kind=str(words[0]),
            begin=begin,
            end=end,
            stage=stage,
            microbatch=microbatch,
        )
    what, over, where = name.partition(" over ")
    if not over:
        return Span(lane="phases", name=name, kind=name, begin=begin, end=end)
    # Of a send the axis is followed by the rank or stage that gets it.
    axis = str(words[-1]) if len(words) > 2 and words[-2] == "over" else where.split(" ")[0]
    return Span(
        lane="communication beside" if is_beside else "communication",
        name=name,
        kind=what,
        begin=begin,
        end=end,
        axis=axis,
        nbytes=nbytes,
    )
