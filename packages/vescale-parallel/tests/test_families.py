from __future__ import annotations

import pytest

from .families import FAMILIES, verdict

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


@pytest.mark.parametrize("family", _SLICE)
def test_a_family_is_cut_soundly_and_as_transformers_would(family: str) -> None:
    assert_sound(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in _SLICE])
@pytest.mark.filterwarnings("ignore")
def test_every_family_is_cut_soundly_and_as_transformers_would(family: str) -> None:
    assert_sound(family)
