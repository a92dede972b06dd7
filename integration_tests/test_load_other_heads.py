"""A head for another number of classes than the files have: refused by name, or left as it is."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .families import CONFIGS
from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan

PLANS: dict[str, Constraints] = {"zero3": {DP: 2, ZERO: 3}, "pp": {PP: 2, PARTS: 2}}


def classifier(num_labels: int, seed: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = AutoConfig.for_model("bert", **CONFIGS["bert"], num_labels=num_labels)
    return AutoModelForSequenceClassification.from_config(config)


def loaded(path: str, constraints: Constraints) -> dict[str, Tensor]:
    model: Any = vescale.parallelize(make_plan(constraints), classifier(5, seed=1))
    for strict in (True, False):
        with pytest.raises(vescale.CheckpointError, match=r"does not fit: classifier") as refused:
            vescale.load_pretrained(model, path, strict=strict)
        assert re.search(r"with only=\[\.\.\.\]", str(refused.value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Nothing is missing of what is asked for.
        vescale.load_pretrained(model, path, only=["bert"])
    return {name: x.full_tensor() for name, x in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_head_of_another_shape_stays_where_the_rest_is_loaded(
    world2: World, tmp_path: Path, plan: str
) -> None:
    saved: Any = classifier(2, seed=0)
    saved.save_pretrained(tmp_path)
    expected = dict(classifier(5, seed=1).named_parameters())
    expected |= {f"bert.{name}": x for name, x in saved.bert.named_parameters()}
    for found in world2.run(loaded, str(tmp_path), PLANS[plan]):
        for name, parameter in expected.items():
            assert torch.equal(found[name], parameter), name
