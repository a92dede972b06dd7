"""Plans of every kind, as the constraints that make them, by the number of ranks they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale import ParallelPlan
from vescale_parallel import with_constraints

DP, ZERO = "data_parallel.size", "data_parallel.zero_stage"
COPIES = "data_parallel.replicate_size"
TP, SEQUENCE = "tensor_parallel.size", "tensor_parallel.sequence"
PP, PARTS = "pipeline_parallel.size", "pipeline_parallel.microbatches"
SCHEDULE, VIRTUAL = "pipeline_parallel.schedule", "pipeline_parallel.virtual_stages"

EP, CP = "expert_parallel.size", "context_parallel.size"

Constraints = Mapping[str, Any]

ONE: dict[str, Constraints] = {"nothing": {}}
TWO: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "pp-gpipe": {PP: 2, PARTS: 4, SCHEDULE: "gpipe"},
    "pp-1f1b": {PP: 2, PARTS: 4},
    "pp-interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "pp-one-part": {PP: 2},
}
FOUR: dict[str, Constraints] = {
    "dp": {DP: 4},
    "hybrid1": {DP: 4, ZERO: 1, COPIES: 2},
    "hybrid2": {DP: 4, ZERO: 2, COPIES: 2},
    "hybrid3": {DP: 4, ZERO: 3, COPIES: 2},
    "zero3": {DP: 4, ZERO: 3},
    "tp": {TP: 4},
    "tp-sequence": {TP: 4, SEQUENCE: True},
    "tp-sequence-zero3": {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3},
    "tp-dp": {TP: 2, DP: 2},
    "tp-zero2": {TP: 2, DP: 2, ZERO: 2},
    "tp-zero3": {TP: 2, DP: 2, ZERO: 3},
    "pp": {PP: 4, PARTS: 4},
    "pp-gpipe": {PP: 4, PARTS: 8, SCHEDULE: "gpipe"},
    "pp-dp": {PP: 2, PARTS: 2, DP: 2},
    "pp-zero1": {PP: 2, PARTS: 4, DP: 2, ZERO: 1},
    "pp-zero2": {PP: 2, PARTS: 2, DP: 2, ZERO: 2},
    "pp-zero3": {PP: 2, PARTS: 2, DP: 2, ZERO: 3},
    "pp-tp": {PP: 2, PARTS: 4, TP: 2},
    "pp-tp-sequence": {PP: 2, PARTS: 4, TP: 2, SEQUENCE: True},
    "pp-interleaved-dp": {
        PP: 2, PARTS: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2, DP: 2, ZERO: 1,
    },
    "pp-interleaved-tp": {
        PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2, TP: 2,
    },
}  # fmt: skip
PLANS = {1: ONE, 2: TWO, 4: FOUR}


def make_plan(constraints: Constraints) -> ParallelPlan:
    """Return the plan of these fields, everything else at its default."""
    return with_constraints(ParallelPlan(), constraints)
