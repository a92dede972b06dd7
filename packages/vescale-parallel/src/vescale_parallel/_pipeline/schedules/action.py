"""One thing that a rank of a pipeline computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` backward, or its two parts: ``"I"`` gradients of the
            stage's input, ``"W"`` gradients of its weights.
        stage: Index of the stage over the whole pipeline.
        microbatch: Index of the micro-batch.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"
