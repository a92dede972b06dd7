"""Mixtures of experts generate as on one device, which tells whether trials leave caches alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .families import make
from .plans import DP, EP, ZERO, Constraints, make_plan


def generated(constraints: Constraints | None) -> Tensor:
    model: Any
    model, batch = make("mixtral")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    ids = batch["input_ids"]
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
        ids = ids.chunk(2)[vescale.data_parallel_rank(model)]
    model.eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **options)


@pytest.mark.by_day("plan0", "plan1")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}, {DP: 2, EP: 2}])
def test_a_mixture_of_experts_generates_as_on_one_device(world2: World, plan: Constraints) -> None:
    assert torch.equal(torch.cat(world2.run(generated, plan)), generated(None))
