"""The matrix of families of models and plans, each verified against one device.

Every cell is one call of ``vescale.verify``: two steps of AdamW on one device and on all ranks of
the plan, emulated in this process. A part of the cells is tested each time, all of them nightly
(``test_matrix.py``).

python -m integration_tests.matrix [--families llama ...] [--plans tp ...] > cells.jsonl
python -m integration_tests.matrix --page docs/reference/matrix.md cells.jsonl ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import vescale

from .families import FAMILIES, make
from .plans import (
    COPIES,
    CP,
    DP,
    EP,
    PARTS,
    PP,
    SCHEDULE,
    SEQUENCE,
    TP,
    ZERO,
    Constraints,
    make_plan,
)

PLANS: dict[str, Constraints] = {
    "dp 4": {DP: 4},
    "ZeRO 1": {DP: 2, ZERO: 1},
    "ZeRO 2": {DP: 2, ZERO: 2},
    "ZeRO 3": {DP: 4, ZERO: 3},
    "hybrid": {DP: 4, ZERO: 3, COPIES: 2},
    "tp": {TP: 2},
    "tp 4, sp": {TP: 4, SEQUENCE: True},
    "pp": {PP: 2, PARTS: 4},
    "pp, zero bubble": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_zero_bubble"},
    "ep": {DP: 2, EP: 2},
    "cp": {CP: 2},
    "cp, ring": {CP: 2, "context_parallel.method": "ring"},
    "tp x ZeRO 3": {TP: 2, DP: 2, ZERO: 3},
    "tp x cp": {TP: 2, CP: 2},
    "tp x ep": {TP: 2, DP: 2, EP: 2},
    "pp x tp, sp": {PP: 2, PARTS: 2, TP: 2, SEQUENCE: True},
    "pp x ZeRO 1": {PP: 2, PARTS: 2, DP: 2, ZERO: 1},
    "pp x ZeRO 3": {PP: 2, PARTS: 2, DP: 2, ZERO: 3},
    "pp x ep": {PP: 2, PARTS: 2, DP: 2, EP: 2},
    "cp x ZeRO 3": {CP: 2, DP: 2, ZERO: 3},
    "pp x tp x dp": {PP: 2, PARTS: 2, TP: 2, DP: 2},
    "pp x tp, sp x ZeRO 3": {PP: 2, PARTS: 2, TP: 2, SEQUENCE: True, DP: 2, ZERO: 3},
    "pp x tp x ep": {PP: 2, PARTS: 2, TP: 2, DP: 2, EP: 2},
    "cp x tp x ZeRO 3": {CP: 2, TP: 2, DP: 2, ZERO: 3},
}
# How a plan is run beside the default, which is float64 in eager mode, and on which plans.
KINDS: dict[str, tuple[Constraints, torch.dtype]] = {
    "float64": ({}, torch.float64),
    "bfloat16": ({}, torch.bfloat16),
    "recompute": ({"recompute": "full"}, torch.float64),
    "compiled": ({"compile": "blocks", "compile_backend": "aot_eager"}, torch.float64),
}
IN_ALL_KINDS = ("ZeRO 3", "tp", "pp", "pp x tp x dp")

Status = Literal["bits", "rounding", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A family under a plan, and what came of verifying it.

    Attributes:
        family: Of models.
        plan: Its name.
        kind: The name of how it is run.
        status: ``"bits"`` if gradients and parameters have one device's, which runs the same
            micro-batches; ``"rounding"`` if they are one device's within rounding; ``"refused"``
            if the plan is refused by name before it runs; ``"failed"`` for anything else.
        detail: The refusal, or the report of the failure.
    """

    family: str
    plan: str
    kind: str
    status: Status
    detail: str = ""


def names() -> Iterator[tuple[str, str, str]]:
    """Give family, plan and kind of every cell."""
    for kind in KINDS:
        for plan in PLANS if kind == "float64" else IN_ALL_KINDS:
            for family in FAMILIES:
                yield family, plan, kind


def verified(family: str, plan: str, kind: str) -> Cell:
    """Verify one cell."""
    constraints, dtype = KINDS[kind]
    batch = make(family)[1]
    batch = batch.get("batch", batch)
    name = {"family": family, "plan": plan, "kind": kind}
    try:
        made = make_plan({**PLANS[plan], **constraints})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers' models
            report = vescale.verify(
                made, lambda: make(family)[0], batch, steps=2, dtype=dtype, max_grad_norm=0.5
            )
    except (ValueError, NotImplementedError) as error:
        return Cell(**name, status="refused", detail=str(error))
    except Exception as error:
        return Cell(**name, status="failed", detail=f"{type(error).__name__}: {error}")
    if not report.passed:
        return Cell(**name, status="failed", detail=str(report))
    has_bits = any(result.level == "N3" and result.status == "passed" for result in report.levels)
    return Cell(**name, status="bits" if has_bits else "rounding")
