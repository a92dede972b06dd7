"""Models too large to be copied for a comparison, of which no smaller one can be made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.guard import ContextGuard
from vescale_parallel._model.blocks import alike_parameters
from vescale_parallel._model.random_copies import random_copy
from vescale_parallel._verify.scaled_down_model import is_large

from .test_context import FEATURES, Block, Model, draws_by, ids

WIDTH = 2**18


class Wide(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, FEATURES))


class Summed(Wide):
    """Features that are summed up over positions."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).cumsum(1)


class Deep(Model):
    def __init__(self, *beside: nn.Module) -> None:
        super().__init__(lambda: Block(Wide()))
        self.blocks = nn.ModuleList(Block(each) for each in beside)


def test_a_large_model_is_compared_with_the_weights_of_one_block() -> None:
    model = Deep(Wide(), Wide())
    assert is_large(model)
    copied = random_copy(model, alike=alike_parameters(model))
    weights = [copied.get_submodule(f"blocks.{at}.qkv").weight for at in range(2)]
    assert weights[0] is weights[1]
    whole = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in copied.parameters()) < 0.51 * whole
    ContextGuard(model, 2, ids(), draws_by)


@pytest.mark.nightly
def test_what_differs_in_a_large_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.0\.beside' returns something else"):
        ContextGuard(Deep(Summed(), Summed()), 2, ids(), draws_by)


def test_a_model_that_memory_may_not_hold_is_refused_before_it_is_copied() -> None:
    with torch.device("meta"):
        model = Deep(Wide(2**24), Wide(2**24))
    with pytest.raises(ValueError, match="elements with one block of each list, at most"):
        ContextGuard(model, 2, ids(), draws_by)
