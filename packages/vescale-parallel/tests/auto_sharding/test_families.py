from __future__ import annotations

from pathlib import Path

import pytest

from .families import FAMILIES, sharded, verdict
from .family_table import said, shown, with_sharded

_PAGE = Path(__file__).parents[4] / "docs" / "reference" / "families.md"

# One of each kind of block: dense, gated, fused, latent, of experts, recurrent, two stacks.
_SLICE = ("gpt_neox", "qwen3", "gpt_oss", "deepseek_v2", "rwkv", "bart-encoder-decoder", "vit")


def assert_sound(family: str) -> None:
    """Every cut is certified in both ways, and without cuts there are reasons."""
    record = verdict(family)
    if "not_built" in record or "not_run" in record:
        pytest.skip(record.get("not_built") or record["not_run"])
    assert record["chosen"] or record["rejected"]
    assert not record["unknown"]
    if "not_certified" in record:
        pytest.skip(record["not_certified"])
    assert not record["failed"]
    assert not record["uncontrolled"]
    assert not record["ranks_wrong"]
    for plan in ("tp", "ep"):
        if record[plan]:
            assert record[plan]["agree"] >= 0.85 * record[plan]["tensors"], record[plan]["differ"]


@pytest.mark.by_day("gpt_neox", "qwen3")
@pytest.mark.parametrize("family", _SLICE)
def test_a_family_is_cut_soundly_and_as_transformers_would(family: str) -> None:
    assert_sound(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in _SLICE])
@pytest.mark.filterwarnings("ignore")
def test_every_family_is_cut_soundly_and_as_transformers_would(family: str) -> None:
    assert_sound(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", said(_PAGE.read_text(encoding="utf-8")))
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_is_sharded(family: str) -> None:
    """If this fails, make the page anew as family_table.py says."""
    assert said(_PAGE.read_text(encoding="utf-8"))[family] == shown(sharded(family))


def test_what_is_sharded_is_written_into_the_page() -> None:
    page = "| families with half of their elements or more sharded | |\n\n"
    page += "| `a` | not run | 9% |\n| `b` | 20% | 8% |\n| `c` | 70% | 7% |\n"
    made = with_sharded(page, [{"family": "a", "sharded": 0.514}, {"family": "b"}])
    assert said(made) == {"a": "51%", "b": "not checked", "c": "70%"}
    assert "or more sharded | 2 of 3 |" in made
