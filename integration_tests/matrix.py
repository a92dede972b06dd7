"""The matrix of families of models and plans, each verified against one device.

Every cell is one call of ``vescale.verify``: two steps of AdamW on one device and on all ranks of
the plan, emulated in this process. A part of the cells is tested each time, all of them nightly
(``test_matrix.py``).

python -m integration_tests.matrix [--families llama ...] [--plans tp ...] [--kinds compiled ...]
    [cells.jsonl ...] >> cells.jsonl
python -m integration_tests.matrix --page docs/reference/matrix.md cells.jsonl ...

Cells that the files name are verified already: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

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
    "cp x ep": {CP: 2, DP: 2, EP: 2},
    "pp x cp": {PP: 2, PARTS: 2, CP: 2},
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
IN_ALL_KINDS = ("ZeRO 3", "tp", "pp", "ep", "cp", "pp x tp x dp")
# Blocks are compiled around what sends, which is not the same in any two of these.
COMPILED = (*IN_ALL_KINDS, "dp 4", "cp, ring", "tp x ep", "cp x ep")
IN_KINDS: dict[str, Sequence[str]] = {"float64": [*PLANS], "compiled": COMPILED}

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
        in_kind = IN_KINDS.get(kind, IN_ALL_KINDS)
        for plan in filter(in_kind.__contains__, PLANS):
            for family in FAMILIES:
                yield family, plan, kind


def verified(family: str, plan: str, kind: str) -> Cell:
    """Verify one cell."""
    constraints, dtype = KINDS[kind]
    name = {"family": family, "plan": plan, "kind": kind}
    batch = _built(family, plan)[1]
    try:
        made = make_plan({**PLANS[plan], **constraints})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers' models
            report = vescale.verify(
                made,
                lambda: _built(family, plan)[0],
                batch,
                steps=2,
                dtype=dtype,
                max_grad_norm=0.5,
            )
    except (ValueError, NotImplementedError) as error:
        return Cell(**name, status="refused", detail=str(error))
    except Exception as error:
        return Cell(**name, status="failed", detail=f"{type(error).__name__}: {error}")
    if not report.passed:
        return Cell(**name, status="failed", detail=str(report))
    has_bits = any(result.level == "N3" and result.status == "passed" for result in report.levels)
    return Cell(**name, status="bits" if has_bits else "rounding")


def _built(family: str, plan: str) -> tuple[nn.Module, Any]:
    """Return a model and its batch."""
    model, batch = make(family)
    if isinstance(model, PreTrainedModel):
        # Grouped products of experts do not run in float64, and sequences are not cut around
        # experts that ask which of them has tokens.
        asks = not PLANS[plan].get(SEQUENCE)
        model.config._experts_implementation = "eager" if asks else "batched_mm"
    return model, batch.get("batch", batch)


PAGE = """# Families and plans

Every cell is one call of [`vescale.verify`](../guide/verify.md): a tiny model of the family trains
for two steps of AdamW with clipped gradients, on one device and on all ranks of the plan, emulated
in one process. Compared are initial values, random numbers, what modules return, losses, every
gradient, parameters and buffers.

- **bits**: gradients have the bits of one device that runs the same micro-batches.
- **yes**: everything is one device's within rounding, which is measured; in float64 that hides
  nothing. Sums over `tp`, `cp` and `ep` are in another order than on one device.
- **-**: refused by name before it runs; why is below the table.
- Empty: not run. A result with a star is of an earlier version of veScale and was not run again;
  numbers and reasons below a table are without these.

`python -m integration_tests.matrix > cells.jsonl` runs all cells, and with
`--page docs/reference/matrix.md cells.jsonl` writes this page.
{tables}"""
EARLIER = "*"
SHOWN: Mapping[Status, str] = {
    "bits": "bits",
    "rounding": "yes",
    "refused": "-",
    "failed": "**no**",
}


def page(cells: Sequence[Cell], before: Mapping[tuple[str, str, str], str]) -> str:
    """Return the page of all cells: a table for each kind, and why plans were refused.

    ``before`` is what the page showed of cells, which stays, marked, where there is no other.
    """
    of_kinds = {kind: [cell for cell in cells if cell.kind == kind] for kind in KINDS}
    return PAGE.format(tables="".join(_table(*each, before) for each in of_kinds.items()))


def shown_on(text: str) -> dict[tuple[str, str, str], str]:
    """Return what a page shows of each cell, by family, plan and kind."""
    shown: dict[tuple[str, str, str], str] = {}
    for section in text.split("\n## ")[1:]:
        kind, _, table = section.partition("\n")
        lines = [line for line in table.splitlines() if line.startswith("|")]
        (_, *families), *rows = [[each.strip() for each in x.split("|")[1:-1]] for x in lines]
        for plan, *cells in rows[1:]:
            shown |= {(family, plan, kind): s for family, s in zip(families, cells, strict=True)}
    return shown


def _table(kind: str, cells: Sequence[Cell], before: Mapping[tuple[str, str, str], str]) -> str:
    found = {(c.family, c.plan): SHOWN[c.status] for c in cells}
    kept = {name[:2]: x.rstrip(EARLIER) + EARLIER for name, x in before.items() if name[2] == kind}
    shown = kept | found
    families = [family for family in FAMILIES if any(family == each for each, _ in shown)]
    lines = [
        f"\n## {kind}\n",
        f"| | {' | '.join(families)} |",
        "| --- " * (1 + len(families)) + "|",
    ]
    for plan in (plan for plan in PLANS if any(plan == each for _, each in shown)):
        row = " | ".join(shown.get((family, plan), "") for family in families)
        lines.append(f"| {plan} | {row} |")
    good = sum(cell.status in ("bits", "rounding") for cell in cells)
    bad = sum(cell.status == "failed" for cell in cells)
    refused = [cell for cell in cells if cell.status == "refused"]
    lines.append(f"\n{good} equal one device, {len(refused)} are refused, {bad} do not.\n")
    lines += [f"- {which}: {why}" for why, which in _reasons(refused).items()]
    return "\n".join(lines) + "\n"


def _reasons(refused: Sequence[Cell]) -> dict[str, str]:
    """Return of each reason, its first sentence, the plans, and of which families."""
    plans: dict[str, dict[str, list[str]]] = {}
    for cell in refused:
        why = " ".join(cell.detail.split()).split(". ")[0][:300].replace("|", "/")
        plans.setdefault(why, {}).setdefault(cell.plan, []).append(cell.family)
    reasons = dict[str, str]()
    for why, of_plan in plans.items():
        alike: dict[str, list[str]] = {}
        for plan, families in of_plan.items():
            alike.setdefault(", ".join(families), []).append(plan)
        reasons[why] = "; ".join(f"{', '.join(plans)} of {of}" for of, plans in alike.items())
    return reasons


def main() -> None:
    """Verify the cells that the command line names, a JSON line each; or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jsonl", nargs="*", type=Path, help="cells that are verified already")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--plans", nargs="*", default=[*PLANS])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    parser.add_argument("--page", type=Path, help="write it, of the cells in the files")
    parsed = parser.parse_args()
    lines = [line for path in parsed.jsonl for line in path.read_text("utf-8").splitlines()]
    cells = {(c.family, c.plan, c.kind): c for c in (Cell(**json.loads(line)) for line in lines)}
    if parsed.page is not None:
        before = shown_on(parsed.page.read_text("utf-8")) if parsed.page.exists() else {}
        known = {*names()} - cells.keys()
        kept = {name: x for name, x in before.items() if x and name in known}
        run = [cells[name] for name in names() if name in cells]
        parsed.page.write_text(page(run, kept), "utf-8")
        return
    for family, plan, kind in names():
        is_named = family in parsed.families and plan in parsed.plans and kind in parsed.kinds
        if is_named and (family, plan, kind) not in cells:
            start = time.monotonic()
            cell = verified(family, plan, kind)
            print(json.dumps(asdict(cell)), flush=True)
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{family}, {plan}, {kind}: {cell.status}, {took}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
