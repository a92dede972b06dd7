"""Make the page of operators from the records of sweeps.

python -m packages.vescale-dtensor.tests.rules.operator_table sweep-*.json > operators.md
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_HEAD = """# Operators

Every operator of torch's own database of operators (`op_db`), run on distributed tensors of 4
ranks, on meshes of shape (4,) and (2, 2), and compared with the plain operator: values on all
ranks, shapes, dtypes and gradients. The placements were `Replicate`, `Shard` of every dim, all
inputs cut alike, `Partial`, `RaggedShard` with ranks that hold nothing, `InterleavedShard`, and
mixtures that were drawn, plain tensors among them. Sizes were even and uneven.

| | |
| --- | --- |
"""
_COLUMNS = """
- *right*: calls whose results and gradients were those of the plain operator, of all calls,
  in-place variants and `out=` included. Every other call was refused, with the reason.
- *same bits*: the share of the right ones that had the same bits; others differ by the rounding
  of a sum whose parts are on several ranks.
- *on parts*: the share of calls in which no operator gathered its inputs; see
  `vescale_dtensor.strict`.

| operator | right | same bits | on parts |
| --- | --- | --- | --- |
"""
_NOT_COMPARED = """
## Not compared

- `out=` of `torch.linalg.matrix_rank`: torch makes it of other operators, out of reach of any
  tensor subclass, and then does not write `out` but returns a new tensor. `out=` of
  `torch.fft.ihfftn` and `ihfft2` along one dim: torch does not write it on one device either.
- Gradients of `torch.masked.prod`: with a zero among the factors torch divides by it on one
  device, and gives NaN; on tensor subclasses it takes a formula that does not.
- `one_hot` of a class out of range: torch raises on one device; for any tensor subclass it leaves
  the check out and makes the operator of others, out of reach, and the row is zeros.
"""


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the page, in Markdown."""
    swept = [record for record in records if not record["skipped"]]
    skipped: dict[str, list[str]] = {}
    for record in records:
        if record["skipped"]:
            skipped.setdefault(record["skipped"], []).append(f"`{record['operator']}`")
    lines = [_row(record) for record in sorted(swept, key=lambda each: each["operator"])]
    page = _HEAD + "\n".join(_summary(swept)) + "\n" + _COLUMNS + "\n".join(lines) + "\n"
    if skipped:
        page += _NOT_COMPARED
        page += "".join(f"- {why}: {', '.join(sorted(names))}\n" for why, names in skipped.items())
    reasons = [_reasons(record) for record in swept if record["not_right"]]
    if reasons:
        page += "\n## Not right under every placement\n\n" + "".join(reasons)
    return page


def _summary(swept: Sequence[dict[str, Any]]) -> Iterable[str]:
    totals: Counter[str] = Counter()
    for record in swept:
        totals.update(_totals(record))
    kinds = sum(totals[kind] for kind in totals if kind not in _SHARES)
    clean = sum(not record["not_right"] for record in swept)
    yield f"| operators | {len(swept)} |"
    yield f"| right under every placement | {clean} ({clean / len(swept):.1%}) |"
    yield f"| calls | {kinds} |"
    for kind in ("right", "refused", *sorted(set(totals) - {"right", "refused", *_SHARES})):
        yield f"| {kind} | {totals[kind]} ({totals[kind] / kinds:.2%}) |"
    yield f"| right, with the same bits | {totals['bitwise']} |"


_SHARES = ("bitwise", "restrided", "gathered")


def _totals(record: dict[str, Any]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for counts in record["counts"].values():
        totals.update(counts)
    return totals


def _row(record: dict[str, Any]) -> str:
    totals = _totals(record)
    calls = sum(totals[kind] for kind in totals if kind not in _SHARES)
    right = max(totals["right"], 1)
    name = f"`{record['operator']}`" + (" (random)" if record["random"] else "")
    return (
        f"| {name} | {totals['right']} of {calls} | {totals['bitwise'] / right:.0%} "
        f"| {1 - totals['gathered'] / right:.0%} |"
    )


def _reasons(record: dict[str, Any]) -> str:
    found = Counter((each["kind"], each["detail"].split("\n")[0]) for each in record["not_right"])
    lines = [
        f"    - {kind}, {count} calls: {why}\n" for (kind, why), count in found.most_common(3)
    ]
    return f"- `{record['operator']}`\n" + "".join(lines)


def main() -> None:
    """Print the page of the records in the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", nargs="+", type=Path)
    records: dict[str, dict[str, Any]] = {}
    for path in parser.parse_args().json:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records[record["operator"]] = record
    print(table(list(records.values())), end="")


if __name__ == "__main__":
    main()
