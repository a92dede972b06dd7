"""The matrix of families and plans: a sample of its cells, and all of them nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from .matrix import Cell, names, page, shown_on, verified

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "matrix.md"

BY_DAY = (
    ("gpt2", "tp x ZeRO 3", "float64"),  # whose vocabulary does not divide
    ("opt", "cp", "float64"),  # which flattens rows and positions
    ("mixtral", "cp, ring", "float64"),
    ("nanogpt", "ZeRO 3", "bfloat16"),
    ("t5", "pp", "recompute"),
    ("nanogpt", "cp", "compiled"),
)


SHOWN = shown_on(PAGE.read_text("utf-8"))


def test_the_page_shows_every_cell() -> None:
    assert {name for name in names() if not SHOWN.get(name)} == set()


@pytest.mark.by_day("gpt2-tp x ZeRO 3-float64")
@pytest.mark.parametrize(
    ("family", "plan", "kind"),
    [pytest.param(*cell, marks=[pytest.mark.nightly] * (cell not in BY_DAY)) for cell in names()],
)
def test_a_family_under_a_plan_is_one_device_or_refused(family: str, plan: str, kind: str) -> None:
    cell = verified(family, plan, kind)
    assert cell.status != "failed", cell.detail
    is_refused = SHOWN[family, plan, kind].startswith("-")
    assert (cell.status == "refused") == is_refused, cell.detail


def test_the_page_says_what_came_of_every_cell() -> None:
    of_llama = {"family": "llama", "kind": "float64"}
    cells = [
        Cell(**of_llama, plan="dp 4", status="bits"),
        Cell(**of_llama, plan="tp", status="rounding"),
        Cell(**of_llama, plan="ep", status="refused", detail="found no | experts. Leave it out"),
        Cell(**of_llama, plan="pp", status="failed", detail="AssertionError"),
    ]
    text = page(cells, {("llama", "cp", "float64"): "bits"})
    for line in (
        "| dp 4 | bits |",
        "| tp | yes |",
        "| ep | - |",
        "| pp | **no** |",
        "| cp | bits* |",
    ):
        assert line in text
    assert "2 equal one device, 1 are refused, 1 do not." in text
    assert "- ep of llama: found no / experts\n" in text
    assert shown_on(text)["llama", "ep", "float64"] == "-"
