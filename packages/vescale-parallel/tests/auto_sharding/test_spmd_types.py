"""Sharding plans before a judge that others wrote: how gradients relate between ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from vescale_parallel import propose_sharding
from vescale_parallel._verify.threads import in_fresh_thread

from .families import FAMILIES, build
from .spmd_types_judge import SIZE, MisfitError, judge

# One of each kind: fused, tied, latent, of experts, with biases that are added to sums.
_DAY = ("gpt2", "qwen3", "gpt_oss", "deepseek_v3")

pytestmark = [
    # The judge calls torch's functional collectives by the names that they had before torch 2.13.
    pytest.mark.filterwarnings("ignore:.*_functional_collectives:FutureWarning"),
    # It makes a world of its own, and an example in a docstring leaves one behind.
    pytest.mark.usefixtures("in_threads"),
]


def judge_apart(model: nn.Module, batch: dict[str, Any], plan: dict[str, str]) -> None:
    in_fresh_thread(lambda: judge(model, batch, plan), of=model)


def plan_of(family: str, *, sequence: bool) -> dict[str, str]:
    model, batch = build(family)
    found = propose_sharding(model, "auto", SIZE, sequence=sequence, example_batch=batch)
    return dict(found.plan)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("family", _DAY)
def test_the_types_of_a_sharded_forward_fit(family: str, sequence: bool) -> None:
    model, batch = build(family)
    judge_apart(model, batch, plan_of(family, sequence=sequence))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "bert",
        "gemma2",
        "mixtral",
        "falcon",
        "gpt_neox",
        "vit",
        "whisper",
        "mamba2",
        "bloom",
    ],
)
def test_the_types_of_more_forwards_along_the_sequence_fit(family: str) -> None:
    model, batch = build(family)
    judge_apart(model, batch, plan_of(family, sequence=True))


@pytest.mark.nightly
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _DAY])
@pytest.mark.filterwarnings("ignore")
def test_the_types_of_every_sharded_forward_fit(family: str) -> None:
    try:
        model, batch = build(family)
        model(**batch)
    # Arbitrary code of others: a family that does not run tiny is not judged.
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    try:
        judge_apart(model, batch, plan_of(family, sequence=False))
    except MisfitError as error:
        if "missing axis" not in str(error):
            raise
        pytest.skip(f"its forward makes a tensor that has no type: {error}")


@pytest.mark.parametrize(
    ("family", "sequence", "mark", "said"),
    [
        ("gpt_oss", False, r"<enter", "Invariant type"),
        ("qwen3", False, r"<grad>", "Invariant type"),
        ("qwen3", True, r"norm.*<grad>", "Invariant type"),
        ("gpt_oss", False, r"<read>", "Invariant type"),
    ],
)
def test_a_forgotten_mark_is_an_error(family: str, sequence: bool, mark: str, said: str) -> None:
    plan = plan_of(family, sequence=sequence)
    left = {name: text for name, text in plan.items() if not re.search(mark, name)}
    assert len(left) < len(plan)
    model, batch = build(family)
    with pytest.raises(MisfitError, match=said):
        judge_apart(model, batch, left)
