"""The table of public families that the planner is run on: its page, and a handful of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coverage import FAMILIES, measure, merged, page

_PAGE = Path(__file__).parents[1] / "docs" / "reference" / "coverage.md"
_RESULTS: dict[str, Any] = json.loads(_PAGE.with_suffix(".json").read_text(encoding="utf-8"))


def test_the_page_is_what_its_results_make() -> None:
    """If this fails, make the page anew as benchmarks/coverage.py says."""
    assert _PAGE.read_text(encoding="utf-8") == page(_RESULTS)


def test_the_page_has_every_family() -> None:
    assert len(FAMILIES) >= 30
    assert list(_RESULTS["families"]) == list(FAMILIES)


def test_later_results_of_a_family_count() -> None:
    about = {"torch": "2", "transformers": "5", "machine": "m", "cluster": "h100"}
    plan: dict[str, Any] = {
        "tp": 8, "pp": 1, "dp": 8, "replicas": 2, "zero": 3, "recompute": "full",
        "accumulation": 4, "step_seconds": 1.5, "memory_bytes": 2**30, "seconds": 3.0,
    }  # fmt: skip
    sharded: dict[str, Any] = {
        "size": 8,
        "share": 0.9999,
        "left_whole": {"a dim 0": "x", "b, c": "y"},
    }
    found = {
        "parameters": 7e9,
        "peak_bytes": 1e9,
        "plans": {"64": plan, "1024": {"error": "no", "seconds": 1.0}},
        "sharded": {**sharded, "seconds": 1.0},
    }
    older = {**about, "families": {"mistral-7b": {"error": "old"}, "bert-large": {"error": "why"}}}
    text = page(merged([older, {**about, "families": {"mistral-7b": found}}]))
    row = (
        "| `mistral-7b` | 7 B | tp 8, dp 8, ZeRO 3 in 2 copies, recomputes, 4 parts: 1.5 s, 1 GiB "
        "| none | 99.9% of 8 | `b`: y | 5 | 1.0 |"
    )
    for line in (row, "- `mistral-7b`, 1,024 ranks: no", "- `bert-large`: why"):
        assert line in text
    assert "old" not in text.split("| --- |")[-1]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers' models
@pytest.mark.parametrize(
    "family", ["falcon-40b", "gpt-j-6b", "gpt2-xl", "mistral-7b", "olmoe-1b-7b", "vit-huge"]
)
def test_a_family_gets_the_plan_of_the_page(family: str) -> None:
    found, said = measure(family, [64], "h100"), _RESULTS["families"][family]
    assert found["sharded"]["share"] == pytest.approx(said["sharded"]["share"], rel=1e-6)
    for name in ("tp", "pp", "dp", "zero", "step_seconds"):
        assert found["plans"]["64"][name] == pytest.approx(said["plans"]["64"][name], rel=1e-6)
    assert sum(each["seconds"] for each in (*found["plans"].values(), found["sharded"])) < 60
