"""Make the page of families from the records of `families`.

python -m packages.vescale-parallel.tests.auto_sharding.families > families.jsonl
python -m packages.vescale-parallel.tests.auto_sharding.family_table \\
    families*.jsonl > docs/reference/families.md

When only the plans have changed, the column of what is sharded can be made anew alone:

python -m packages.vescale-parallel.tests.auto_sharding.families --sharded > sharded.jsonl
python -m packages.vescale-parallel.tests.auto_sharding.family_table \\
    --page docs/reference/families.md sharded.jsonl

Nightly tests fail when the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_HEAD = """# Families of models

What tensor parallelism shards of the families of models of transformers, each built with two
small blocks and random weights, and cut among 2 ranks. Nothing below was written for a family:
the cuts come from one forward on fake tensors.

What is *sharded* is what a run has: the plan of `propose_sharding(model, "auto", 2)`, compared
with one device as a whole. Each cut that was *found* on the way was checked alone, with real
numbers in float64 in two ways: every rank's partial sums and gradients, computed one rank after
the other, sum to those of one device (and permuting the axis in all its parameters changes
nothing, while in one parameter alone it does; unless biases of each head, which are no parameters,
number it). A cut may be right and not be in the plan.

| | |
| --- | --- |
"""
_COLUMNS = """
- *sharded*: the share of the model's elements that ranks hold a part of, in the plan that passed
  its check. Tables of small models are large.
- *found*: the share of the elements that are in a cut that was found.
- *cuts*: of features (heads and hidden features), of vocabulary (rows of tables) and of experts.
- *right*: cuts that passed both checks; of equal blocks two were checked.
- *transformers*: matrices cut along the same dimension as by the plan that transformers ships
  for tensor parallelism, of those it cuts; then the same of its plan for experts. Where that plan
  only stores a matrix in parts and gathers what it gives, so do we.
- *whole*: the largest matrices that are in no cut, and a reason.

| family | sharded | found | cuts | right | transformers | whole |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the page, in Markdown."""
    records = sorted(records, key=lambda record: record["family"])
    ran = [record for record in records if "chosen" in record]
    page = _HEAD + "\n".join(_summary(ran)) + "\n" + _COLUMNS
    page += "\n".join(map(_row, ran)) + "\n"
    others = [record for record in records if "chosen" not in record]
    if others:
        page += "\n## Not run\n\nEither the small model could not be built or run at all, or its "
        page += "forward needs values of activations.\n\n" + "".join(map(_not_run, others))
    return page


def _summary(ran: Sequence[dict[str, Any]]) -> Iterable[str]:
    checked = [record for record in ran if "not_certified" not in record]
    right = sum(record["ranks"] for record in checked)
    wrong = sum(len(record["ranks_wrong"]) + len(record["failed"]) for record in checked)
    yield f"| families run | {len(ran)} |"
    yield _sharded_line([shown(record) for record in ran])
    yield f"| families with a cut | {sum(record['chosen'] > 0 for record in ran)} |"
    yield f"| of heads or hidden features | {sum(r['kinds']['features'] > 0 for r in ran)} |"
    yield f"| cuts checked | {right + wrong} |"
    yield f"| right | {right} ({right / (right + wrong):.1%}) |"
    yield f"| operators without a rule | {len({u for r in ran for u in r['unknown']})} |"
    for key, words in (
        ("tp", "matrices that transformers' plans cut, cut alike"),
        ("tp_chosen", "the same, without gathering outputs"),
        ("ep", "stacked experts that its plans cut, cut alike"),
    ):
        plans = [record[key] for record in ran if record[key]]
        agree, tensors = (sum(plan[name] for plan in plans) for name in ("agree", "tensors"))
        yield f"| {words} | {agree} of {tensors} ({agree / tensors:.1%}), {len(plans)} families |"


def _row(record: dict[str, Any]) -> str:
    cuts = ", ".join(f"{n} {kind}" for kind, n in record["kinds"].items() if n) or "none"
    if "not_certified" in record:
        right = "not checked"
    else:
        wrong = len(record["ranks_wrong"]) + len(record["failed"])
        right = f"{record['ranks']} of {record['ranks'] + wrong}"
    plans = [record[kind] for kind in ("tp", "ep") if record[kind]]
    shipped = ", ".join(f"{plan['agree']} of {plan['tensors']}" for plan in plans) or "-"
    return (
        f"| `{record['family']}` | {shown(record)} | {record['share']:.0%} | {cuts} | {right} "
        f"| {shipped} | {_whole(record)} |"
    )


def shown(record: dict[str, Any]) -> str:
    """Return what the page says of the share that is sharded."""
    share: float | None = record.get("sharded")
    return "not checked" if share is None else f"{share:.0%}"


def said(page: str) -> dict[str, str]:
    """Return what a page says is sharded, by family."""
    return {found[1]: found[2] for found in _ROW.finditer(page)}


def with_sharded(page: str, records: Sequence[dict[str, Any]]) -> str:
    """Return a page with what is sharded as in ``records``, and otherwise as it was."""
    new = {record["family"]: shown(record) for record in records}
    page = _ROW.sub(lambda found: f"| `{found[1]}` | {new.get(found[1], found[2])} |", page)
    return _SHARDED_LINE.sub(lambda _: _sharded_line(list(said(page).values())), page)


_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|", re.MULTILINE)
_SHARDED_LINE = re.compile(r"^\| families with half of their elements.*$", re.MULTILINE)


def _sharded_line(shares: Sequence[str]) -> str:
    shares = [share for share in shares if share != "not run"]
    half = sum(share.endswith("%") and int(share[:-1]) >= 50 for share in shares)
    return f"| families with half of their elements or more sharded | {half} of {len(shares)} |"


def _whole(record: dict[str, Any]) -> str:
    total = sum(numel for _, numel, _ in record["whole"]) / max(1 - record["share"], 1e-9)
    shown: list[str] = []
    for pattern, numel, reasons in record["whole"]:
        if numel < 0.02 * total or len(shown) == 2:
            break
        why = [reason for reason in reasons if "the batch" not in reason]
        text = f": {why[-1].partition(': ')[2]}" if why else ""
        shown.append(f"`{pattern}`{text}".replace("|", "/"))
    return "; ".join(shown)


def _not_run(record: dict[str, Any]) -> str:
    why = record.get("not_built") or record["not_run"]
    short = " ".join(why.split()).replace("ObservationError: expected a forward that runs on ", "")
    return f"- `{record['family']}`: {short[:160]}\n"


def main() -> None:
    """Print the page of the records in the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jsonl", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, help="write what is sharded into this page")
    parsed = parser.parse_args()
    records: dict[str, dict[str, Any]] = {}
    for path in parsed.jsonl:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records[record["family"]] = record
    if parsed.page is None:
        print(table(list(records.values())), end="")
    else:
        page = with_sharded(parsed.page.read_text(encoding="utf-8"), list(records.values()))
        parsed.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
