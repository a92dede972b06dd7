"""Models too large to be run whole: their blocks, and tables that only their module reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify import equivalence
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.manual_plan import checked_plan
from vescale_parallel._verify.whole_model import passed_over

from . import odd_models as odd
from .one_device import check_against_one_device

IDS = torch.arange(24).view(2, 12) % odd.ROWS
BLOCK = sum(p.numel() for p in odd.Block().parameters())


class Plain(nn.Module):
    """Tables, blocks, a pair of layers behind them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack = nn.Embedding(odd.ROWS, 12), odd.Stacked()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, odd.ROWS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stack(self.embed(ids))
        return self.head(x + self.down(self.up(x).relu()))


class ReadsTheTable(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.linear(self.embed.weight, self.head.weight).sum()


class ReadsABlock(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        first = self.stack.blocks[0]
        assert isinstance(first, odd.Block)
        return super().forward(ids) + first.down.weight.sum()


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks fit and models not."""
    monkeypatch.setattr(equivalence, "MAX_NUMEL", BLOCK)


BLOCKS_UP = "stack.blocks.*.up.weight"


@pytest.mark.by_day("ReadsTheTable-cut1")
@pytest.mark.parametrize(
    ("make", "cut"),
    [
        (Plain, {BLOCKS_UP, "embed.weight", "head.weight"}),
        (ReadsTheTable, {BLOCKS_UP}),
        (ReadsABlock, {"embed.weight", "head.weight"}),
    ],
)
def test_what_was_not_compared_stays_whole(make: Callable[[], nn.Module], cut: set[str]) -> None:
    torch.manual_seed(0)
    model = make().double()
    found = propose_sharding(model, "auto", 2, example_batch=(IDS,))
    some = {BLOCKS_UP, "embed.weight", "head.weight", "up.weight"}
    assert some.intersection(found.plan) == cut
    assert any("is too large to be run whole" in why for why in found.left_whole.values())
    check_against_one_device(model, (IDS,), found.plan, 2)


def test_a_plan_by_hand_is_taken_with_a_warning() -> None:
    model = Plain()
    plan = {"up.weight": "Shard(0)", "down.weight": "Shard(1)", BLOCKS_UP: "Shard(0)"}
    plan["stack.blocks.*.down.weight"] = "Shard(1)"
    with pytest.warns(UserWarning, match=r"'up\.weight' fits in shape and was not compared"):
        checked_plan(model, shard(plan, model, 2), (IDS,))


def test_equal_blocks_in_the_middle_are_passed_over() -> None:
    model = nn.Sequential(*[odd.Block() for _ in range(6)], nn.Identity())
    calls = DryRuns(model, (torch.zeros(2, 6, 12),)).blocks()
    over = passed_over(model, calls, dict.fromkeys(calls, "equal"))
    assert over == {"1": ["2", "3", "4"]}
    assert passed_over(model, calls, {fqn: fqn for fqn in calls}) == {}
